"""An update that failed leaves nothing behind: loaded again, a worker trains as one that never failed."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import WITHOUT_CHECKPOINTING
from many_ranks import on_ranks
from saving import saved
from sequences import sequence_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleFailed, RolemeshError, UpdateFailed
from rolemesh.ranks.executor import Command
from rolemesh.ranks.follower import follow
from rolemesh.ranks.leader import Leader
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.rendezvous import Rendezvous
from rolemesh.ranks.sharding import local
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.training import update_loop
from rolemesh.workers.commands import command_of
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

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
EVERYWHERE = ("actor", "critic", "offloaded", "critic, offloaded")


def job_of(model: Path, directory: Path, sections: dict[str, Any]) -> JobConfig:
    """Two mini-batches of two micro-batches."""
    base = {
        "model": {"path": str(model)} | WITHOUT_CHECKPOINTING,
        "ppo_mini_batch_size": ROWS // 2,
        "ppo_micro_batch_size_per_gpu": 2,
        "optim": {"lr": 1e-3},
    }
    given = {
        "data": {"train_batch_size": ROWS, "max_prompt_length": 6, "max_response_length": 10},
        "trainer": {"device": "cpu", "default_local_dir": str(directory)},
        "actor": base,
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


def places(operations: Sequence[str], begun: bool, everywhere: bool) -> set[int]:
    """Return operations at which an update shall fail: some over all of it, and those around optimizer steps.

    Args:
        operations: of an update that fails nowhere.
        begun: whether the optimizer has made steps before. Else it allocates the moments of one parameter
            after another; five operations before the first step, those of the last one are missing.
        everywhere: else in a pass and after a step alone.
    """
    steps = [number for number, name in enumerate(operations, 1) if "_fused_adamw" in name]
    assert len(steps) >= 2
    third = len(operations) // 3
    if not everywhere:
        return {steps[-1]} if begun else {2 * third, steps[0] + 1}
    return {third, steps[-1]} if begun else {1, 2 * third, steps[0] - 5, steps[0] + 1, len(operations)}


@pytest.mark.parametrize("case", CASES)
async def test_a_worker_loaded_after_a_failure_trains_as_a_fresh_one(
    case: str, two_layers: Path, tmp_path: Path
) -> None:
    """Whether a checkpoint is loaded, or the initial state."""
    role, sections = CASES[case]
    job = job_of(two_layers, tmp_path, sections)
    worker, first = WORKERS[role](job), WORKERS[role](job)
    await first.update(batch_of(0))
    await saved(first, tmp_path / "saved")
    for start in (None, tmp_path / "saved"):
        untouched, counted = WORKERS[role](job), Memory()
        await untouched.load_checkpoint(start)
        async with counted.of(untouched):
            expected = await untouched.update(batch_of(1))
        await worker.load_checkpoint(start)
        for place in places(counted.operations, begun=start is not None, everywhere=case in EVERYWHERE):
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
async def test_an_answer_that_failed_leaves_no_activation(role: str, two_layers: Path, tmp_path: Path) -> None:
    worker = WORKERS[role](job_of(two_layers, tmp_path, {}))
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
    role: str, two_layers: Path, tmp_path: Path
) -> None:
    """The weights have changed, and the number of steps has not."""
    sections = {"actor": {"fsdp_config": OFFLOAD}, "critic": {"model": {"fsdp_config": OFFLOAD}}}
    job = job_of(two_layers, tmp_path / "run", sections)
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


def test_a_torch_that_cannot_reset_shards_is_named_after_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain module stands for the sharded one of torch 2.11."""
    monkeypatch.setattr(update_loop, "FSDPModule", torch.nn.Linear)
    with pytest.raises(RuntimeError, match=r"UpdateFailed: nan; torch \S+ cannot go on with sharded weights"):
        update_loop._abandon(torch.nn.Linear(1, 1), UpdateFailed("nan"))


# ----------------------------------------------------------------------------------- on two ranks

# Tokens that no row of sequence_batch has: where each makes a rank fail, and in which of the two passes of its
# mini-batch.
POISONS = {
    250: ("forward", 1),
    251: ("forward", 2),
    252: ("backward", 1),
    253: ("backward", 2),
    254: ("step", 2),
}
ON_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("actor", {"actor": {"use_kl_loss": True, "entropy_coeff": 0.01}}),
    "moved": ("actor", {"actor": {"fsdp_config": {"param_offload": True} | OFFLOAD}}),
    "adapter, chosen tokens": ("actor", merge(CASES["adapter"][1], CASES["chosen tokens"][1])),
    "critic": ("critic", {}),
}


class Poison:
    """Makes a worker's real model fail where a token of its rows says, alike on every rank.

    The error is one that a group of ranks survives. In the forward pass it fails in the first block. In the
    backward pass it fails there too, when the gradients of later blocks have been added over the ranks, and
    some of this block's are whole.
    """

    def __init__(self, worker: Any) -> None:
        model = worker.model.body if isinstance(worker, CriticWorker) else worker.model.get_decoder()
        self._passes, self._place = Counter[int](), ""
        model.get_input_embeddings().register_forward_pre_hook(self._look)
        model.layers[0].self_attn.register_forward_hook(self._compute)
        worker.optimizer._adamw.register_step_pre_hook(lambda *_: self._fail_at("step"))

    def _look(self, module: Any, inputs: tuple[Tensor]) -> None:
        self._place = ""
        for token, (place, number) in POISONS.items():
            if (inputs[0] == token).any() and (place == "forward" or torch.is_grad_enabled()):
                self._passes[token] += 1
                self._place = place if self._passes[token] == number else ""

    def _compute(self, module: Any, inputs: Any, output: Any) -> None:
        self._fail_at("forward")
        attended = tree_leaves(output)[0]
        if attended.requires_grad:
            attended.register_hook(lambda _: self._fail_at("backward"))

    def _fail_at(self, place: str) -> None:
        if self._place == place:
            self._passes.clear()
            self._place = ""
            raise RoleFailed(f"poisoned in {place}")


# A row from which an update fails, in the first mini-batch of six rows or in the second, and the token at which
# it does; None: gradients that are not finite.
Way = tuple[int, int | None]
EVERY_WAY: list[Way] = [*((0, token) for token in POISONS), (0, None), (6, 253), (6, None)]
FEW_WAYS: list[Way] = [(0, 254), (6, None)]


def failing_batches(ways: Sequence[Way]) -> Iterator[tuple[type[Exception], DataProto]]:
    for begin, token in ways:
        batch = batch_of(2, 12)
        if token is not None:
            batch["input_ids"][begin:, 6] = token
            yield RoleFailed, batch
            continue
        for column in ("advantages", "returns"):
            batch[column][begin:] = torch.nan
        yield UpdateFailed, batch


async def survive(worker: Any, untouched: Any, ways: Sequence[Way]) -> None:
    """Fail in each of these ways, and train as the other one after each."""
    expected = learnt(await untouched.update(batch_of(1, 12)))
    for error, batch in failing_batches(ways):
        with pytest.raises(error):
            await worker.update(batch)
        await worker.load_checkpoint(None)
        assert learnt(await worker.update(batch_of(1, 12))) == expected, error
        await worker.load_checkpoint(None)
    await worker.update(batch_of(1, 12))


def survive_on_ranks(ranks: Ranks, directory: Path, model: Path) -> None:
    """Two workers of every case; the first fails, and ends as the second does."""
    rendezvous = Rendezvous.of(os.environ)
    names = [f"{case}, {which}" for case in ON_RANKS for which in ("failing", "untouched")]
    threads = {name: ComputingThread(name) for name in names}
    worker_contexts = {name: WorkerContext(threads[name], ranks=Ranks.of_process("cpu")) for name in names}
    workers: dict[str, Any] = {}
    for name in names:
        role, sections = ON_RANKS[name.rpartition(",")[0]]
        two_steps = {role: {"ppo_mini_batch_size": 6}, "data": {"train_batch_size": 12}}
        job = job_of(model, directory / name / str(ranks.rank), merge(two_steps, sections))
        workers[name] = threads[name].submit(WORKERS[role], job, worker_contexts[name]).result()
        if "failing" in name:
            Poison(workers[name])

    def command(name: str, method: str) -> Command:
        return command_of(workers[name], method)

    async def lead() -> None:
        leader = Leader(names, rendezvous)
        await leader.start()
        await leader.gather()
        for name in names:
            object.__setattr__(worker_contexts[name], "executor", leader.executor(name))
        for case in ON_RANKS:
            ways = EVERY_WAY if case == "plain" else FEW_WAYS
            await survive(workers[f"{case}, failing"], workers[f"{case}, untouched"], ways)
        await leader.close()

    if ranks.rank == 0:
        asyncio.run(lead())
    else:
        try:
            asyncio.run(follow(names, rendezvous, threads, command))
        except RolemeshError as error:  # rank 0 says why
            raise AssertionError from error
    for case in ON_RANKS:
        failing, untouched = (workers[f"{case}, {which}"] for which in ("failing", "untouched"))
        assert all(parameter.grad is None for parameter in failing.model.parameters())
        assert same(everything(failing), everything(untouched)), case


def test_ranks_loaded_after_a_common_failure_train_as_fresh_ones(two_layers: Path, tmp_path: Path) -> None:
    on_ranks(2, survive_on_ranks, tmp_path, two_layers)
