"""An update that failed leaves nothing behind: loaded again, a worker trains as one that never failed."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from saving import saved
from sequences import sequence_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.ranks.sharding import local
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.critic.worker import CriticWorker

WORKERS: dict[str, Callable[..., Any]] = {"actor": ActorWorker, "critic": CriticWorker}
ROWS = 8
OFFLOAD = {"optimizer_offload": True}
CLIP_COV = {"loss_mode": "clip_cov", "clip_cov_ratio": 0.3, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0}
# name: a role, and sections of its job
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "actor": ("actor", {"actor": {"use_kl_loss": True, "entropy_coeff": 0.01, "shuffle": True}}),
    "chosen tokens": ("actor", {"actor": {"policy_loss": CLIP_COV}}),
    "bypass": ("actor", {"algorithm": {"rollout_correction": {"bypass_mode": True}}}),
    "checkpointed": ("actor", {"actor": {"model": {"enable_gradient_checkpointing": True}}}),
    "adapter": ("actor", {"actor": {"model": {"lora_rank": 2}}}),
    "offloaded": ("actor", {"actor": {"fsdp_config": OFFLOAD}}),
    "sft": ("actor", {"algorithm": {"page": "sft"}}),
    "dpo": ("actor", {"algorithm": {"page": "dpo"}}),
    "critic": ("critic", {"critic": {"ppo_epochs": 2, "shuffle": True}}),
    "critic, offloaded": ("critic", {"critic": {"model": {"fsdp_config": OFFLOAD}}}),
}


def job_of(model: Path, directory: Path, sections: dict[str, Any]) -> JobConfig:
    """Two mini-batches of two micro-batches."""
    base = {"ppo_mini_batch_size": ROWS // 2, "ppo_micro_batch_size_per_gpu": 2, "optim": {"lr": 1e-3}}
    given = {
        "data": {"train_batch_size": ROWS, "max_prompt_length": 6, "max_response_length": 10},
        "trainer": {"device": "cpu", "default_local_dir": str(directory)},
        "actor": base | {"model": {"path": str(model)}},
        "critic": base,
    }
    return make_job(merge(given, sections))


def batch_of(seed: int, num_rows: int = ROWS) -> DataProto:
    batch = sequence_batch(num_rows, seed=seed)
    batch["rollout_log_probs"] = batch["old_log_probs"] + 0.1
    batch["contexts"] = (torch.arange(10) >= 5).long().expand(num_rows, 10).contiguous()
    return batch


def everything(worker: Any) -> dict[str, Tensor]:
    """This rank's rows of weights and moments, as they are now."""
    with worker.optimizer.on_device():
        tensors = {**worker.model.state_dict(), **worker.optimizer.state_tensors()}
        return {name: local(tensor).detach().clone() for name, tensor in tensors.items()}


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def learnt(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without measured times."""
    return {name: value for name, value in metrics.items() if not name.startswith(("perf/", "timing_s/"))}


# -------------------------------------------------------------------------------- at every place


class Memory(TorchDispatchMode):
    """Counts torch's operations on a thread. The chosen one fails, as on a device that is full.

    Args:
        fails_at: number of the operation, from 1; None: none fails.

    Attributes:
        operations: their names so far.
        made: weak references to what they returned.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self._fails_at, self.operations, self.made = fails_at, list[str](), list[weakref.ref[Tensor]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(function.name())
        if len(self.operations) == self._fails_at:
            raise torch.OutOfMemoryError(f"no memory for operation {self._fails_at}, {function.name()}")
        result = function(*args, **(kwargs or {}))
        self.made += [weakref.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

    @asynccontextmanager
    async def of(self, worker: Any) -> AsyncIterator[None]:
        """Enter it on the worker's thread."""
        await worker.run(self.__enter__)
        try:
            yield
        finally:
            await worker.run(self.__exit__, None, None, None)

    def held(self, worker: Any) -> list[torch.Size]:
        """Shapes of what was made and is still there, besides weights and moments and rows of the batch."""
        known = [*worker.model.parameters(), *worker.optimizer.tensors()]
        storages = {0, *(tensor.untyped_storage().data_ptr() for tensor in known)}
        tensors = [tensor for ref in self.made if (tensor := ref()) is not None]
        return [
            tensor.shape
            for tensor in tensors
            if tensor.numel() > ROWS * 16 and tensor.untyped_storage().data_ptr() not in storages
        ]


def places(operations: Sequence[str]) -> Iterator[int]:
    """Yield operations at which an update shall fail: some over all of it, and those around optimizer steps.

    Before its first step an optimizer allocates the moments of one parameter after another; five operations
    before the step, those of the last one are missing.
    """
    steps = [number for number, name in enumerate(operations, 1) if "_fused_adamw" in name]
    assert len(steps) >= 2
    evenly = [len(operations) * part // 5 for part in range(1, 5)]
    yield from sorted({1, *evenly, steps[0] - 5, steps[0], steps[0] + 1, steps[-1], len(operations)})


@pytest.mark.parametrize("case", CASES)
async def test_after_a_failure_anywhere_a_loaded_worker_trains_as_an_untouched_one(
    case: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Whether a checkpoint is loaded, or the initial state."""
    role, sections = CASES[case]
    job = job_of(tiny_model, tmp_path, sections)
    worker, first = WORKERS[role](job), WORKERS[role](job)
    await first.update(batch_of(0))
    await saved(first, tmp_path / "saved")
    for start in (None, tmp_path / "saved"):
        untouched, counted = WORKERS[role](job), Memory()
        await untouched.load_checkpoint(start)
        async with counted.of(untouched):
            expected = await untouched.update(batch_of(1))
        await worker.load_checkpoint(start)
        for place in places(counted.operations):
            memory = Memory(place)
            async with memory.of(worker):
                with pytest.raises(torch.OutOfMemoryError) as failure:
                    await worker.update(batch_of(1))
            assert len(memory.operations) >= place
            assert not memory.held(worker), (failure, "is still referenced")
            assert all(parameter.grad is None for parameter in worker.model.parameters())
            assert worker.optimizer.num_updates or not worker.optimizer.tensors()
            await worker.load_checkpoint(start)
            assert await worker.update(batch_of(1)) == expected
            assert same(everything(worker), everything(untouched)), counted.operations[place - 1]
            await worker.load_checkpoint(start)


@pytest.mark.parametrize("role", WORKERS)
async def test_an_answer_that_failed_leaves_no_activation(role: str, tiny_model: Path, tmp_path: Path) -> None:
    worker = WORKERS[role](job_of(tiny_model, tmp_path, {}))
    answer = worker.compute_values if role == "critic" else worker.compute_log_probs
    counted = Memory()
    async with counted.of(worker):
        expected = await answer(batch_of(0))
    for part in range(1, 5):
        memory = Memory(len(counted.operations) * part // 5)
        async with memory.of(worker):
            with pytest.raises(torch.OutOfMemoryError) as failure:
                await answer(batch_of(0))
        assert not memory.held(worker), (failure, "is still referenced")
    again = await answer(batch_of(0))
    assert all(torch.equal(again[column], expected[column]) for column in expected.columns)


@pytest.mark.parametrize("role", WORKERS)
async def test_a_step_whose_moments_could_not_be_moved_is_undone(
    role: str, tiny_model: Path, tmp_path: Path
) -> None:
    """The weights have changed, and the number of steps has not."""
    sections = {"actor": {"fsdp_config": OFFLOAD}, "critic": {"model": {"fsdp_config": OFFLOAD}}}
    job = job_of(tiny_model, tmp_path / "run", sections)
    worker, untouched = WORKERS[role](job), WORKERS[role](job)
    initial = everything(worker)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    job.run_dir.rename(job.run_dir.with_name("away"))
    job.run_dir.touch()
    with pytest.raises(FileExistsError):
        await worker.update(batch_of(1))
    job.run_dir.unlink()
    assert worker.optimizer.num_updates == 0
    assert not same({name: everything(worker)[name] for name in initial}, initial)
    await worker.load_checkpoint(None)
    assert same(everything(worker), initial)
    assert await worker.update(batch_of(1)) == await untouched.update(batch_of(1))
    assert same(everything(worker), everything(untouched))
