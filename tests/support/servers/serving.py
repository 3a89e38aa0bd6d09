"""Real roles on real ports: in this process, or in another process by `rolemesh serve`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forks
import torch

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.processes.serve import group_server, load_group
from rolemesh.telemetry import metrics
from rolemesh.workers.local import LocalWorker

P, T = 6, 8

# Scores a row with its index. With `started`, reports that it has begun; with `gate`, waits for a byte.
GATED_REWARD = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info,
                  log, started="", gate="", opens="", after=0):
    with open(log, "a") as file:
        file.write(f"{extra_info['index']}\\n")
    if started:
        put(started, 1)
    if gate:
        fd = os.open(gate, os.O_RDONLY)
        os.read(fd, 1)
        os.close(fd)
    if opens and len(open(log).readlines()) == after:
        put(opens, 1000)
    return float(extra_info["index"])

def put(fifo, count):
    fd = os.open(fifo, os.O_WRONLY)
    os.write(fd, b"." * count)
    os.close(fd)
"""


@dataclass
class Gate:
    """A FIFO that is held open at both ends, so no byte is lost if the writer comes before the reader."""

    path: Path
    fd: int

    def open(self, count: int = 1000) -> None:
        os.write(self.fd, b"." * count)

    async def passed(self, call: asyncio.Task[Any]) -> None:
        """Wait for a byte from the call; raise if the call ends before it writes one."""
        byte = asyncio.create_task(asyncio.to_thread(os.read, self.fd, 1))
        await asyncio.wait({byte, call}, return_when=asyncio.FIRST_COMPLETED)
        if not byte.done():
            self.open(1)
            await byte
            raise AssertionError(f"the call ended: {call}")


@contextmanager
def gate(path: Path) -> Iterator[Gate]:
    os.mkfifo(path)
    held = Gate(path, os.open(path, os.O_RDWR))
    try:
        yield held
    finally:
        held.open()  # no process keeps waiting, even if a test fails
        os.close(held.fd)


def reward_job(model: Path, directory: Path, **reward_kwargs: Any) -> JobConfig:
    """Make a job with GATED_REWARD and these arguments; it logs scored rows in directory/scored."""
    directory.mkdir(parents=True, exist_ok=True)
    function = directory / "gated.py"
    function.write_text(GATED_REWARD)
    kwargs = {"log": str(directory / "scored"), **reward_kwargs}
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": P, "max_response_length": T},
            # one judge, so that rows are scored in the order in which they come
            "reward": {
                "num_workers": 1,
                "custom_reward_function": {"path": str(function), "reward_kwargs": kwargs},
            },
            "trainer": {"default_local_dir": str(directory), "device": "cpu"},
        }
    )


def scored(directory: Path) -> list[int]:
    """Return the indices of the rows scored there, in order."""
    log = directory / "scored"
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


def reward_batch(rows: int) -> DataProto:
    return DataProto.from_dict(
        {
            "prompts": torch.arange(rows * P).reshape(rows, P) % 200,
            "prompt_mask": torch.ones(rows, P, dtype=torch.bool),
            "responses": torch.arange(rows * T).reshape(rows, T) % 200,
            "response_mask": torch.ones(rows, T, dtype=torch.bool),
        },
        {
            "uid": [f"row-{i}" for i in range(rows)],
            "data_source": ["test"] * rows,
            "reward_model": [{"style": "rule", "ground_truth": str(i)} for i in range(rows)],
            "extra_info": [{"index": i} for i in range(rows)],
        },
    )


@asynccontextmanager
async def served(role: str, *jobs: JobConfig) -> AsyncIterator[list[str]]:
    """Serve a replica of the role for each job, in this process; yield their addresses."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(served_group([role], job)) for job in jobs]


@asynccontextmanager
async def served_group(roles: Sequence[str], job: JobConfig) -> AsyncIterator[str]:
    """Serve the roles of a group in this process, and end its threads and processes; yield their address."""
    server = group_server(roles, job)
    address = await server.start("127.0.0.1:0")
    workers: list[LocalWorker] = []
    try:
        workers, servicers = await load_group(roles, job)
        await server.ready(servicers)
        yield address
    finally:
        await server.drain(0)
        for worker in workers:
            await asyncio.to_thread(worker.close)


async def train_over_grpc(job: JobConfig) -> None:
    """The whole run with every group behind a port."""
    async with AsyncExitStack() as stack:
        addresses: dict[str, list[str]] = {role: [] for role in job.roles}
        for group, roles in job.plan.grouping.items():
            for _ in range(job.plan[group].replicas):
                address = await stack.enter_async_context(served_group(roles, job))
                for role in roles:
                    addresses[role].append(address)
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, "127.0.0.1:0", None)


def num_switches() -> float:
    """Count how often a device has switched from one role to another in this process."""
    samples = next(iter(metrics.LEASE_SWITCH_SECONDS.collect())).samples
    return sum(sample.value for sample in samples if sample.name.endswith("_count"))


@dataclass
class Process:
    """A process of `rolemesh serve`."""

    process: forks.Command
    address: str
    metrics: str
    health: str


@asynccontextmanager
async def serve_process(
    role: str, job: JobConfig, directory: Path, *options: str, executed: bool = False
) -> AsyncIterator[Process]:
    """Start the role in its own process. Its port is bound, but it may still be loading.

    The process is a fork of one that has imported, or with `executed` one of its own, as a user's.
    """
    config, address_file = directory / "job.yaml", directory / "address.json"
    config.write_text(job.to_yaml())
    arguments = ["--config", str(config), "--address-file", str(address_file), "--exit-with-parent", *options]
    ports = ["--metrics-listen", "127.0.0.1:0", "--health-listen", "127.0.0.1:0"]
    process = await (forks.executed if executed else forks.start)("serve", role, *ports, *arguments)
    try:
        while not address_file.exists() and process.returncode is None:  # noqa: ASYNC110  # another process's file
            await asyncio.sleep(0.02)
        bound = json.loads(address_file.read_text()) if address_file.exists() else {}
        yield Process(process, bound.get("address", ""), bound.get("metrics", ""), bound.get("health", ""))
    finally:
        process.kill()
        await process.communicate()
