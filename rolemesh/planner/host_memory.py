"""Estimates the host memory of a rollout whose engine computes on GPUs.

The largest part is the version that the rollout has received. It is kept for other rollouts that pull it from
here, and the engine reads it in place. The size of the weights is known; the processes' memory is a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolemesh.config import JobConfig
from rolemesh.planner.device_specs import GIB
from rolemesh.planner.memory import Shapes, published_width

# Python, libraries and buffers of an engine's processes: of vLLM, of each further GPU of vLLM, and of hf. These
# are guesses, not measured in a pod.
VLLM_BYTES = 7 * GIB
RANK_BYTES = 3 * GIB
HF_BYTES = 3 * GIB


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory of a rollout's pod.

    Args:
        processes: of the engines, without weights; a guess.
        version: the received version, in the dtype in which the actor publishes.
        asleep: weights of sleeping engines.
    """

    processes: int
    version: int
    asleep: int

    @property
    def weights(self) -> int:
        """Bytes that are certainly needed."""
        return self.version + self.asleep

    @property
    def total(self) -> int:
        return self.processes + self.weights


def host_memory(job: JobConfig, shapes: Shapes, roles: Sequence[str], engines: int = 1) -> HostMemory | None:
    """Return the host memory of a pod with a rollout on GPUs; None if no rollout has a model there.

    Args:
        job: the job.
        shapes: by role.
        roles: of the pod. If several have models, the engines sleep in turns.
        engines: number of engines in the pod, one for each rank of a group that trains.
    """
    if "rollout" not in roles or "rollout" not in shapes:
        return None
    sleeps = job.rollout.free_cache_engine and sum(job.on_device(role) for role in roles) > 1
    job = job.with_dtypes("cuda")
    version = published_width(job) * shapes["rollout"].policy_parameters
    if job.engine.reserves_memory:
        processes = VLLM_BYTES + (job.rollout.tensor_model_parallel_size - 1) * RANK_BYTES
    else:
        processes = HF_BYTES
    return HostMemory(engines * processes, version, engines * version if sleeps else 0)
