"""A pretended GPU: tensors that say `cuda:0` and compute on the CPU, under CUDA's rules.

It needs no driver. The roles' real code runs on it, with CUDA's autocast and the kernels' preconditions. An
operation that mixes devices fails, as on a GPU. Every kernel, copy, wait and cast is counted, with the line
that asked for it.

    with pretended_gpu() as gpu, gpu.worker(ActorWorker, job) as actor:
        gpu.record.clear()
        await actor.compute_log_probs(batch)
        assert gpu.record.number("wait") == 0, gpu.record.lines("wait")

docs/testing.md says what it does not show. It uses private names of torch, so a new version may need a change
here.
"""

from pretended_gpu.gpu import PretendedGpu, pretended_gpu
from pretended_gpu.record import Budget, Record
from pretended_gpu.tensors import GpuTensor, MixedDevices

__all__ = ["Budget", "GpuTensor", "MixedDevices", "PretendedGpu", "Record", "pretended_gpu"]
