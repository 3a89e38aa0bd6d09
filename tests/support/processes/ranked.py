"""Real ranks: each is `serve` in a process of its own, forked from one that has imported everything."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from forks import fork_calling
from namespaces import as_machine

from rolemesh import errors
from rolemesh.batch_validation import BatchValidator
from rolemesh.catalog.role_specs import ROLES, RoleSpec
from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.methods import Method, methods
from rolemesh.ranks import leader, rank_messages
from rolemesh.ranks.follower import follow
from rolemesh.ranks.rendezvous import Rendezvous, local_store
from rolemesh.rpc.calling.clients import RoleClient
from rolemesh.services.processes.serve import serve
from rolemesh.services.reward.servicer import RewardServicer
from rolemesh.telemetry import context
from rolemesh.weights import manifest
from rolemesh.workers.commands import on_all_ranks
from rolemesh.workers.local import LocalWorker, on_worker_thread
from rolemesh.workers.worker_context import WorkerContext


class DrillWorker(LocalWorker):
    """Does on every rank what a batch's uid says, and notes it in a file of the rank."""

    def __init__(self, job: JobConfig, worker_context: WorkerContext | None = None) -> None:
        super().__init__("drill", worker_context)
        self.validator = BatchValidator.of(methods(job), "drill", None)
        self._directory, self._rank = job.run_dir, self.worker_context.ranks.rank
        self.do(json.loads(os.environ.get("DRILL_LOAD", "{}")))

    @on_worker_thread
    def compute_scores(self, rows: DataProto) -> DataProto:
        self.drill([rows] * self.worker_context.executor.size)
        return DataProto.from_dict({"acc": torch.zeros(len(rows))})

    @on_all_ranks
    def drill(self, rows: DataProto) -> DataProto:
        for cell in rows["uid"]:
            with (self._directory / f"notes-{self._rank}").open("a") as notes:
                notes.write(f"{cell}\n")
            self.do(json.loads(cell))
        return DataProto()

    def do(self, what: Mapping[str, Any]) -> None:
        """`blocks`, `meets`, `raises`: ranks that wait for ever, compute together, raise `error`."""
        if self._rank in what.get("starts", []):
            put(self._directory / "started")
        if self._rank in what.get("blocks", []):
            os.read(os.open(self._directory / "never", os.O_RDWR), 1)
        if self._rank in what.get("meets", []):
            self.worker_context.ranks.wait()
        if self._rank in what.get("raises", []):
            error = what["error"]
            name = error.partition(":")[0]
            of_class = getattr(errors, name, None) or getattr(torch, name, RuntimeError)
            raise of_class(f"{error} on purpose on rank {self._rank}")


class DrillClient(RoleClient):
    role = "drill"

    async def compute_scores(self, rows: DataProto) -> DataProto:
        return await self._batch("compute_scores", rows)

    async def drill(self, **what: Any) -> None:
        await self.compute_scores(DataProto.from_dict(non_tensors={"uid": [json.dumps(what)]}))


DRILL = RoleSpec(
    name="drill",
    code=DrillWorker,
    methods=lambda job: [Method("drill", "compute_scores", "ComputeScores", ("uid",), ("acc",))],
    service="rolemesh.rpc.contract:REWARD",
    servicer=RewardServicer,
    client=DrillClient,
    recorded="rolemesh.graph.recording:RecordedReward",
    trained=True,
    meaning="does what it is told",
)


def drill_job(directory: Path) -> JobConfig:
    """Make a job with the role drill; in a context of ROLES.adding(DRILL)."""
    every = {"all": [role for role in ROLES if role != "drill"], "drill": ["drill"]}
    return make_job(
        {
            "placement": {"strategy": "custom", "groups": every},
            "trainer": {"default_local_dir": str(directory), "device": "cpu"},
        }
    )


def put(fifo: Path) -> None:
    fd = os.open(fifo, os.O_WRONLY)
    os.write(fd, b".")
    os.close(fd)


@dataclass
class Group:
    """The processes of one group of ranks."""

    directory: Path
    processes: list[Any]

    async def address(self) -> str:
        """Rank 0's."""
        path = self.directory / "address-0.json"
        while not path.exists():  # noqa: ASYNC110  # another process's file
            await asyncio.sleep(0.02)
        return str(json.loads(path.read_text())["address"])

    async def shown(self, rank: int, name: str) -> list[str]:
        """A rank's lines at /metrics of this name."""
        address = json.loads((self.directory / f"address-{rank}.json").read_text())["metrics"]
        page = await asyncio.to_thread(lambda: urlopen(f"http://{address}/metrics").read().decode())
        return [line for line in page.splitlines() if line.startswith(f"{name}{{")]

    async def started(self, count: int) -> None:
        """Wait until so many ranks have said that they begin."""
        fd = os.open(self.directory / "started", os.O_RDWR)
        for _ in range(count):
            await readable(fd)
            os.read(fd, 1)
        os.close(fd)

    async def ended(self, *ranks: int) -> list[int | None]:
        """Exit codes of all ranks, or of these."""
        chosen = [self.processes[rank] for rank in ranks or range(len(self.processes))]
        return await exit_codes(chosen)

    def log(self, rank: int) -> str:
        return (self.directory / f"log-{rank}").read_text()

    def notes(self, rank: int) -> list[str]:
        return (self.directory / f"notes-{rank}").read_text().splitlines()

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)


async def readable(fd: int) -> None:
    """Wait for a byte, or for a process's end; without a thread, which many tests at a time would lack."""
    loop, there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(fd)


async def exit_codes(processes: Sequence[Any]) -> list[int | None]:
    """Wait until all processes have ended."""
    for process in processes:
        await readable(process.sentinel)
        process.join()
    return [process.exitcode for process in processes]


@contextmanager
def group(
    directory: Path,
    size: int,
    *,
    keepalive_s: float = 10,
    ranks: int | None = None,
    target: Callable[..., None] | None = None,
    **environment: str,
) -> Iterator[Group]:
    """Start the ranks of a drill.

    Args:
        directory: for their files.
        size: number of ranks.
        keepalive_s: replaces both constants of rank_messages.py.
        ranks: how many of them come; None: all.
        target: what each runs, called with its directory, environment and keepalive_s; None: a drill.
        environment: more variables of every rank.
    """
    directory.mkdir(parents=True, exist_ok=True)
    os.mkfifo(directory / "started")
    os.mkfifo(directory / "never")
    with met(size) as shared:
        environments = [
            shared | {"RANK": str(rank)} | environment for rank in range(size if ranks is None else ranks)
        ]
        with forked(target or _drill, [(directory, each, keepalive_s) for each in environments]) as processes:
            yield Group(directory, processes)


@contextmanager
def serving(
    roles: Sequence[str], job: JobConfig, directory: Path, size: int, *, on_machines: bool = False
) -> Iterator[Group]:
    """Start the ranks of a group with these roles; `on_machines`: none can open another's memory."""
    directory.mkdir(parents=True, exist_ok=True)
    with met(size) as shared:
        environments = [shared | {"RANK": str(rank)} for rank in range(size)] if size > 1 else [{"RANK": "0"}]
        target = _serve_apart if on_machines else serve_rank
        with forked(target, [(roles, job, directory, each) for each in environments]) as processes:
            yield Group(directory, processes)


def _serve_apart(*arguments: Any) -> None:
    manifest.PIECE_BYTES = 1 << 16  # so that a tiny model has several stripes
    as_machine(partial(serve_rank, *arguments))


@contextmanager
def met(size: int) -> Iterator[dict[str, str]]:
    """Yield the environment of ranks, but their number, with a store in this process where they meet."""
    store = local_store(size)
    yield {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@contextmanager
def forked(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Any]]:
    """Run the target in a process for each tuple of arguments; kill what is left of them at the end."""
    processes: list[Any] = []
    try:
        for each in arguments:
            processes.append(fork_calling(target, *each))
            processes[-1].start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def follower(directory: Path, rendezvous: Rendezvous) -> None:
    """Follow a leader that has the roles a and b, and end as `serve` does. Commands are Recorder's."""
    torch.set_num_threads(1)
    logging.basicConfig(filename=directory / f"log-{rendezvous.rank}", level=logging.INFO)
    recorders = {role: Recorder(directory, role, rendezvous.rank) for role in "ab"}
    threads = {role: ThreadPoolExecutor(1) for role in "ab"}
    try:
        asyncio.run(follow("ab", rendezvous, threads, lambda role, name: getattr(recorders[role], name)))
    except errors.RoleUnavailable as error:
        logging.error("%s", error)
        os._exit(1)
    os._exit(0)


class Recorder:
    """A role on one rank: notes in a file what it computes, in that order."""

    def __init__(self, directory: Path, role: str, rank: int) -> None:
        self.file, self._rank = directory / f"notes-{role}-{rank}", rank

    def note(self, rows: DataProto) -> DataProto:
        with self.file.open("a") as notes:
            notes.write(f"{rows.meta_info['id']} {context.step.get()}\n")
        return DataProto(meta_info={"rank": self._rank})

    def echo(self, rows: DataProto) -> DataProto:
        return rows

    def fail(self, rows: DataProto) -> DataProto:
        """Raise the error that meta_info has for this rank, if it has one."""
        name = rows.meta_info["errors"][self._rank]
        if name:
            raise getattr(errors, name, RuntimeError)(f"{name} on purpose on rank {self._rank}")
        return DataProto()


def _drill(directory: Path, environment: Mapping[str, str], keepalive_s: float) -> None:
    leader.OTHERS_S = float(environment.get("DRILL_OTHERS_S", leader.OTHERS_S))
    with ROLES.adding(DRILL):
        serve_rank(["drill"], drill_job(directory), directory, environment, keepalive_s)


def serve_rank(
    roles: Sequence[str],
    job: JobConfig,
    directory: Path,
    environment: Mapping[str, str],
    keepalive_s: float = 10,
) -> None:
    """Serve one rank of a group in this process, with its log and its address in the directory."""
    log = os.open(directory / f"log-{environment['RANK']}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    for key in [key for key in rank_messages.KEEPALIVE if key.endswith("_ms")]:
        rank_messages.KEEPALIVE[key] = int(keepalive_s * 1000)
    address = directory / f"address-{environment['RANK']}.json"
    try:
        asyncio.run(serve(roles, job, "127.0.0.1:0", metrics_listen="127.0.0.1:0", address_file=address))
    except errors.RolemeshError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
