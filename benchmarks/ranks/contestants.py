"""An actor of one rank or of two, in processes that take turns, and what a turn is.

One rank has two threads, two ranks have one each: both have two cores. The ranks of verl's scheme are the same
two processes. Outside its turn a process waits and takes no processor time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import yaml

from benchmarks.ranks.verl import PaddedMeans
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.ranks.follower import follow
from rolemesh.ranks.leader import Leader
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.rendezvous import Rendezvous, local_store
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.stripe_server import StripeServer
from rolemesh.wire.allocator import tune
from rolemesh.workers.commands import ShardedBatch, command_of, on_all_ranks
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

PROCESSES = multiprocessing.get_context("spawn")
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
LR = 1e-4


def job_of(
    model: Path, directory: Path, rows: int, micro: int, lengths: tuple[int, int], ranks: int
) -> JobConfig:
    trained = {"ppo_mini_batch_size": rows, "ppo_micro_batch_size_per_gpu": micro, "optim": {"lr": LR}}
    return make_job(
        {
            "data": {
                "train_batch_size": rows,
                "max_prompt_length": lengths[0],
                "max_response_length": lengths[1],
            },
            "actor": {"model": {"path": str(model), "enable_gradient_checkpointing": False}, **trained},
            "critic": trained,  # the job must be whole; only the actor is made
            "placement": {"ranks": {"actor": ranks}},
            "trainer": {"device": "cpu", "default_local_dir": str(directory / "run")},
        }
    )


def uneven_rows(rows: int, lengths: tuple[int, int], seed: int = 0) -> DataProto:
    """Rows with responses of very uneven length, as a policy gives them: a quarter of the width on average."""
    generator = torch.Generator().manual_seed(seed)
    prompt, response = lengths
    drawn = torch.empty(rows).exponential_(4 / response, generator=generator)
    ends = prompt + drawn.long().clamp(1, response)
    mask = torch.arange(prompt + response) < ends[:, None]
    sampled = mask[:, prompt:]
    ids = torch.randint(200, mask.shape, generator=generator)
    return DataProto(
        {
            "input_ids": torch.where(mask, ids, 256),
            "attention_mask": mask.long(),
            "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0),
            "response_mask": sampled,
            "old_log_probs": -5.5 * sampled,
            "advantages": torch.randn(rows, response, generator=generator),
        }
    )


class Actor(ActorWorker):
    """The actor, with commands that a benchmark asks for."""

    def __init__(self, job: JobConfig, worker_context: WorkerContext, rows: DataProto) -> None:
        super().__init__(job, worker_context)
        self.rows = rows
        self.waited = _timed_collectives() if worker_context.ranks.mesh else [0.0]
        self._plain: PaddedMeans | None = None

    @on_all_ranks
    def nothing(self, part: DataProto) -> DataProto:
        return DataProto()

    @on_all_ranks
    def timed_learn(self, part: DataProto) -> DataProto:
        """`learn`; and the seconds of it, of its collectives, and of the processor."""
        self.waited[0] = 0.0
        began = time.perf_counter()
        cpu = time.process_time()
        answer = type(self).learn.__wrapped__(self, part)  # type: ignore[attr-defined]
        seconds = time.perf_counter() - began
        figures = {"learn": seconds, "collectives": self.waited[0], "cpu": time.process_time() - cpu}
        return DataProto(meta_info=figures | {"grad_norm": answer.meta_info["grad_norm"]})

    @on_all_ranks
    def plain(self, part: DataProto) -> DataProto:
        """An update by verl's scheme."""
        if self._plain is None:
            assert self.worker_context.ranks.mesh is not None
            path = Path(self.config.path)
            micro_batch = self.job.actor.ppo_micro_batch_size_per_gpu
            self._plain = PaddedMeans(path, self.worker_context.ranks.mesh, micro_batch, LR)
        return DataProto(meta_info={"grad_norm": self._plain.update(part)})

    def turn_of(self, name: str) -> dict[str, Any]:
        """Take a turn on the worker's thread, on rank 0."""
        counts = self._counts()
        sharded = ShardedBatch.of(self.rows, self._micro_batches, self.worker_context.ranks, mini_batch=counts)
        began = time.perf_counter()
        if name == "verl":
            [figures, *_] = self.plain(list(self.rows.split(len(self.rows) // self.worker_context.ranks.size)))
            return {"seconds": time.perf_counter() - began, "grad_norm": figures.meta_info["grad_norm"]}
        if name == "commands":
            return {"seconds": _median(lambda: self.nothing(self._parts()), 100)}
        if name == "rows":
            return {"seconds": _median(lambda: self.nothing(sharded.parts), 20)}
        answers = self.timed_learn(sharded.parts)
        return {"seconds": time.perf_counter() - began, "ranks": [answer.meta_info for answer in answers]}

    def _counts(self) -> list[int]:
        mask = self.rows["response_mask"]
        return [int(mask.sum()), *mask.shape]

    @on_all_ranks
    def spent(self, part: DataProto) -> DataProto:
        """Processor seconds of this rank's process until now."""
        return DataProto(meta_info={"cpu": time.process_time()})

    async def turn_at(self, name: str, version: int) -> dict[str, Any]:
        """Take a turn: learn, verl, commands, rows, update or publish.

        Returns:
            `seconds`; `cpu`, processor seconds of all ranks; and more, by turn.
        """
        before = await self.run(self._spent)
        figures = await self._turn_at(name, version)
        return figures | {"cpu": await self.run(self._spent) - before}

    def _spent(self) -> float:
        return float(sum(answer.meta_info["cpu"] for answer in self.spent(self._parts())))

    async def _turn_at(self, name: str, version: int) -> dict[str, Any]:
        began = time.perf_counter()
        if name == "publish":
            published: Any = await self.publish_weights(version)
            held = published.holding  # makes the checksums, unless the ranks have
            seconds = time.perf_counter() - began
            del published, held
            return {"seconds": seconds}
        if name == "update":
            metrics = await self.update(self.rows)
            return {"seconds": time.perf_counter() - began, "grad_norm": metrics["actor/grad_norm"]}
        return await self.run(self.turn_of, name)


def _median(call: Callable[[], Any], number: int) -> float:
    seconds = []
    for _ in range(number):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _timed_collectives() -> list[float]:
    """From here on, add the seconds that this process spends in collectives to the list's only number."""
    waited = [0.0]
    depth = [0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            depth[0] += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1
                if not depth[0]:  # a collective that waits for itself counts once
                    waited[0] += time.perf_counter() - began

        return call

    for name in COLLECTIVES:
        setattr(dist, name, timed(getattr(dist, name)))
    dist.Work.wait = timed(dist.Work.wait)  # type: ignore[method-assign]  # FSDP waits later than it begins
    return waited


# ------------------------------------------------------------------------------------- processes


@contextmanager
def actor_of(
    size: int, job: JobConfig, rows: DataProto, threads: int, *, on_machines: bool = False
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Start an actor of `size` ranks, and yield a function that gives it a turn and returns its figures.

    `on_machines`: no rank maps another's memory, as if each were on a machine of its own.
    """
    here, there = PROCESSES.Pipe()
    store = local_store(size)
    text = job.to_yaml()
    columns = dict(rows.tensors)
    processes = [
        PROCESSES.Process(
            target=_main,
            args=(rank, size, store.port, text, columns, threads, on_machines, there if not rank else None),
        )
        for rank in range(size)
    ]
    with patch.dict(os.environ, OMP_WAIT_POLICY="PASSIVE"):  # as of a role's process (role_environment)
        for process in processes:
            process.start()
    there.close()  # so that a dead actor ends `recv`

    def turn(name: str, version: int = 0) -> dict[str, Any]:
        here.send((name, version))
        return dict(here.recv())

    try:
        here.recv()
        yield turn
    finally:
        for process in processes:
            process.kill()
            process.join()


def _main(
    rank: int, size: int, port: int, text: str, columns: Any, threads: int, on_machines: bool, pipe: Any
) -> None:
    tune()
    torch.set_num_threads(threads)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if on_machines:
        WeightRegion.open_to_fill = lambda shared, num_bytes: None  # type: ignore[method-assign]
    job = make_job(yaml.safe_load(text))
    rows = DataProto(columns)
    thread = ComputingThread("actor")
    rendezvous = Rendezvous(rank, size, "127.0.0.1", port, "0")
    rendezvous.join()
    ranks = Ranks.of_process("cpu")
    worker_context = WorkerContext(thread, ranks=ranks)
    worker: Actor = thread.submit(Actor, job, worker_context, rows).result()
    if rank:
        asyncio.run(_follow(worker, worker_context, rendezvous))
    else:
        asyncio.run(_take_turns(worker, worker_context, rendezvous, pipe))


async def _follow(worker: Actor, worker_context: WorkerContext, rendezvous: Rendezvous) -> None:
    stripe_server = StripeServer(rendezvous, "127.0.0.1:0", asyncio.get_running_loop())
    worker.worker_context = replace(worker_context, stripe_server=stripe_server)
    await follow(
        ["actor"], rendezvous, {"actor": worker_context.thread}, lambda role, name: command_of(worker, name)
    )


async def _take_turns(worker: Actor, worker_context: WorkerContext, rendezvous: Rendezvous, pipe: Any) -> None:
    if rendezvous.size > 1:
        leader = Leader(["actor"], rendezvous)
        await leader.start()
        await leader.gather()
        worker.worker_context = replace(worker_context, executor=leader.executor("actor"))
    pipe.send("ready")
    while True:
        name, version = await asyncio.to_thread(pipe.recv)
        pipe.send(await worker.turn_at(name, version))


def parts_of(figures: Sequence[dict[str, Any]], commands: float, rows: float) -> dict[str, float]:
    """Divide the seconds of an update on several ranks.

    Args:
        figures: what `timed_learn` measured on each rank.
        commands: seconds of an empty command.
        rows: seconds of a command with the rows.

    Returns:
        Seconds of `commands`; of `rows`, to send them; `collectives`, of the rank that waited least;
        `computing`, processor seconds of a rank in the mean; and `imbalance`, how many more the slowest has.
        Processor seconds, because they depend little on what else the machine does.
    """
    computing = [each["cpu"] for each in figures]
    mean = statistics.fmean(computing)
    return {
        "commands": commands,
        "rows": max(0.0, rows - commands),
        "collectives": min(each["collectives"] for each in figures),
        "imbalance": max(computing) - mean,
        "computing": mean,
    }
