"""The planner's memory and seconds of ranks against two real ranks on this CPU.

    python -m benchmarks.planner.planned_ranks

Seconds are the processor's, so other work on the machine counts little. A rank's own part of a model is small
here, so the rest of a process's memory weighs more than on a GPU.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.planner.calibration import calibrated
from benchmarks.planner.plan import RESULTS, _experience, _status, make_model, make_ppo
from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.planner.cost import role_parts
from rolemesh.planner.device_specs import available_memory, cpu, human_size
from rolemesh.planner.memory import role_memory, role_shapes
from rolemesh.ranks.follower import follow
from rolemesh.ranks.leader import Leader
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.rendezvous import Rendezvous, local_store
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.command_line.arithmetic import write_arithmetic
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.processes.launchers import LOOPBACK, RankSlot, rank_environment
from rolemesh.wire.allocator import give_back_free_memory
from rolemesh.workers.commands import command_of
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

PROCESSES = multiprocessing.get_context("spawn")

# hidden size, layers, vocabulary
MODELS = {"10 M": (384, 4, 4096), "25 M": (512, 6, 8192)}
ROWS = 8  # a micro-batch


def measure(directory: Path, updates: int) -> list[dict[str, Any]]:
    """Estimate and measurement of each case; the measured one is the larger of the ranks'."""
    torch.set_num_threads(1)
    cases = []
    for name, model in MODELS.items():
        path = make_model(directory / f"model {name}", *model)
        job = make_ppo(directory, path, prompts=4 * ROWS, micro=ROWS, lengths=(64, 64))
        for role, size in (("actor", 1), ("actor", 2), ("critic", 2)):
            placed = make_job(merge(job.model_dump(), {"placement": {"ranks": {role: size}}}))
            device = calibrated(cpu(available_memory()), hidden=model[0])
            measured = _on_ranks(size, placed, role, updates)
            shape = role_shapes(job)[role]
            if size > 1:
                device = replace(device, call_latency=0, link_latency=measured[0]["latency"])
                device = replace(device, link_bandwidth=measured[0]["bandwidth"])
            memory = role_memory(job, role, {role: shape}, device, size)
            # Each rank has a thread of its own, and computes nothing while it gathers.
            own = replace(device, shared=False, network_bandwidth=device.link_bandwidth)
            parts = role_parts(job, role, shape, own, size, job.data.train_batch_size)["update"]
            for part, estimate, of_ranks in (
                ("memory", memory.total, [rank["bytes"] for rank in measured]),
                ("seconds", sum(parts.values()), [rank["seconds"] for rank in measured]),
            ):
                case = {"part": part, "role": role, "model": name, "ranks": size, "estimate": estimate}
                cases.append(case | {"measured": max(of_ranks), "ratio": estimate / max(of_ranks)})
            cases[-1]["parts"] = parts
    return cases


def _on_ranks(size: int, job: JobConfig, role: str, updates: int) -> list[dict[str, float]]:
    """What each rank tells: peak bytes beyond what the process had, CPU seconds of an update, and of gloo."""
    stores = [local_store(size) for _ in range(2)]  # one for each time that a leader starts
    ends = []
    processes = []
    for rank in range(size):
        here, there = PROCESSES.Pipe()
        arguments = (there, rank, size, [store.port for store in stores], job, role, updates)
        processes.append(PROCESSES.Process(target=_rank, args=arguments))
        processes[-1].start()
        ends.append(here)
    try:
        return [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(
    pipe: Any, rank: int, size: int, ports: Sequence[int], job: JobConfig, role: str, updates: int
) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.alone()
    here = RankSlot(rank, size)
    given = [rank_environment(rank, size, here, LOOPBACK, port) for port in ports]
    first, second = map(Rendezvous.of, given)
    if size > 1:
        os.environ |= given[0]
        first.join()
        ranks = Ranks.of_process("cpu")
    link = _link(ranks)
    _worked(job, role, ranks, first, 1)  # what libraries take at their first use is no role's
    gc.collect()
    give_back_free_memory()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, begins anew
    seconds = _worked(job, role, ranks, second, updates)
    pipe.send({"bytes": _status("VmHWM") - before, "seconds": statistics.median(seconds)} | link)
    os._exit(0)  # without waiting for the threads of gloo


def _worked(job: JobConfig, role: str, ranks: Ranks, rendezvous: Rendezvous, updates: int) -> list[float]:
    """CPU seconds of this rank's updates."""
    thread = ComputingThread(role)
    worker_context = WorkerContext(thread, ranks=ranks)
    worker: Any = thread.submit(ActorWorker if role == "actor" else CriticWorker, job, worker_context).result()
    seconds: list[float] = []

    async def lead() -> None:
        leader = Leader([role], rendezvous) if ranks.size > 1 else None
        if leader:
            await leader.start()
            await leader.gather()
            object.__setattr__(worker_context, "executor", leader.executor(role))
        held = await worker.publish_weights(1) if role == "actor" else None
        for _ in range(updates + 1):
            began = time.process_time()
            await worker.update(_experience(job))
            seconds.append(time.process_time() - began)
        del held
        if leader:
            await leader.close()

    if ranks.rank == 0:
        asyncio.run(lead())
    else:
        began = time.process_time()
        asyncio.run(follow([role], rendezvous, {role: thread}, lambda _, name: command_of(worker, name)))
        seconds += [0.0, (time.process_time() - began) / (updates + 1)]
    worker.close()
    return seconds[1:]


def _link(ranks: Ranks) -> dict[str, float]:
    """Latency and bandwidth of gloo's all-gather between the ranks, in CPU seconds."""
    if ranks.size == 1:
        return {}

    def gathered(num_bytes: int, repeats: int) -> float:
        mine = torch.zeros(num_bytes // ranks.size, dtype=torch.uint8)
        whole = torch.empty(len(mine) * ranks.size, dtype=torch.uint8)
        seconds = []
        for _ in range(5):
            began = time.process_time()
            for _ in range(repeats):
                dist.all_gather_single(whole, mine, group=ranks.group)
            seconds.append((time.process_time() - began) / repeats)
        return min(seconds)

    latency = gathered(64, 200)
    large = 2**24
    moving = max(1e-6, gathered(large, 10) - latency)
    return {"latency": latency / (ranks.size - 1), "bandwidth": large * (ranks.size - 1) / ranks.size / moving}


def show(cases: list[dict[str, Any]]) -> None:
    table = Table(title="two ranks on this CPU: the planner's estimate and what a rank took")
    for heading in ("part", "role", "model", "ranks", "estimate", "measured", "ratio"):
        table.add_column(heading, justify="left" if heading in ("part", "role", "model") else "right")
    for case in cases:
        unit = human_size if case["part"] == "memory" else lambda value: f"{value:.2f} s"
        numbers = unit(case["estimate"]), unit(case["measured"]), f"{case['ratio']:.2f}"
        table.add_row(case["part"], case["role"], case["model"], str(case["ranks"]), *numbers)
    Console().print(table)


def main(updates: Annotated[int, typer.Option(help="Updates of each case, after a first one.")] = 3) -> None:
    """Print a table, and write benchmarks/results/planned_ranks.json."""
    torch.manual_seed(0)
    with TemporaryDirectory() as temporary:
        write_arithmetic(Path(temporary) / "data")
        cases = measure(Path(temporary), updates)
    show(cases)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "planned_ranks.json").write_text(json.dumps(cases, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
