"""The kernels that the planner prices, against those that roles launch on a pretended GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_jobs import ROWS, gpu_job
from pretended_gpu import PretendedGpu
from sequences import sequence_batch

from rolemesh.models.tiny import make_tiny_model
from rolemesh.planner.cost import OUTSIDE
from rolemesh.planner.device_specs import PASS_KERNELS, TRAINED_KERNELS
from rolemesh.services.actor.worker import ActorWorker

ONE_PASS = {"ppo_mini_batch_size": ROWS, "ppo_micro_batch_size_per_gpu": ROWS}
NEAR = 0.15


async def launched(gpu: PretendedGpu, model: Path, *, checkpointing: bool) -> tuple[int, int]:
    """Return the kernels of one micro-batch's log-probs, and of one's update."""
    job, batch = gpu_job(model, checkpointing=checkpointing, actor=ONE_PASS), sequence_batch(ROWS)
    with gpu.worker(ActorWorker, job) as worker:
        await worker.update(batch)  # the first one allocates the optimizer's state
        found = []
        for call in (worker.compute_log_probs, worker.update):
            gpu.record.clear()
            await call(batch)
            found.append(gpu.record.number("kernel"))
    return found[0], found[1]


@pytest.mark.usefixtures("here")
async def test_a_block_launches_as_many_kernels_as_are_priced(gpu: PretendedGpu, tmp_path: Path) -> None:
    """The difference between models of three blocks and of one, by two; the rest is outside of the blocks."""
    one, three = (make_tiny_model(tmp_path / str(n), hidden_size=32, num_layers=n) for n in (1, 3))
    passes, trained = zip(
        await launched(gpu, one, checkpointing=False),
        await launched(gpu, three, checkpointing=False),
        strict=True,
    )
    of_pass, of_trained = (passes[1] - passes[0]) / 2, (trained[1] - trained[0]) / 2
    _, repeated = await launched(gpu, three, checkpointing=True)
    of_repeat = (repeated - trained[1]) / 3
    assert of_pass == pytest.approx(PASS_KERNELS, rel=NEAR)
    assert of_trained == pytest.approx(TRAINED_KERNELS, rel=NEAR)
    assert of_repeat <= PASS_KERNELS
    assert passes[0] - of_pass <= OUTSIDE * PASS_KERNELS
