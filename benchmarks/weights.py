"""New weights, 241 MiB, for 1, 2, 4 and 8 replicas on this machine, by each way that they can take.

    python -m benchmarks.weights [--repeats N]

The holder and every replica are processes of their own; a replica is a rollout worker with the engine hf and a
real model, and relays as a rollout service does. The ways take turns, and the fastest and the median turn are
kept. A turn is a sync. It begins when the holder publishes (copies and hashes), and ends when the last replica
uses the version.

In use: `RolloutWorker.update_weights` has returned, so the next decode step computes with the new weights. The
engine hf takes the region's memory for its parameters and copies nothing, however the bytes came. The process
that put bytes into memory of this machine verifies them, so "in use" by memory reads no byte. The work that
remains for the first step is measured separately, as "read": until the last replica has read every parameter
once, which maps the pages into its process, all replicas at the same time.

memory: holder and replicas on one machine. first by network: the holder is on another machine, the replicas
are on one. chain: every replica is on a machine of its own and pulls from the one before. star: all pull from
the holder, which is how it was before there were relays. "Another machine" is this one, its memory left aside:
the links of a chain share the cores which they would each have for themselves. So the CPU time of all processes
together is given too; it also depends less on what else the machine does.

Writes benchmarks/results/weights.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

from rich.console import Console
from rich.table import Table

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.models.loading import load_causal_lm, named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.rpc.contract import WEIGHTS
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.rollout.engines.hf import HfEngine
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics
from rolemesh.v1.weights_pb2 import SharedRegion
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.wire import allocator

RESULTS = Path(__file__).parent / "results" / "weights.json"
NUM_REPLICAS = (1, 2, 4, 8)
WAYS = ("memory", "first by network", "chain", "star")


def job_of(model: Path) -> JobConfig:
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": 8, "max_response_length": 8},
            "trainer": {"device": "cpu", "default_local_dir": str(model / "runs")},
        }
    )


# ------------------------------------------------------------------------------------ processes


@asynccontextmanager
async def serving(store: WeightStore) -> AsyncIterator[None]:
    server = RoleServer({"rollout": [WEIGHTS]})
    print(await server.start("127.0.0.1:0"), flush=True)
    await server.ready({WEIGHTS: WeightsServicer(store)})
    yield
    await server.drain(0)


async def commands() -> AsyncIterator[Any]:
    """The lines of standard input, until it closes."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield json.loads(line)


async def hold(job: JobConfig) -> None:
    """Publishes a version for each line of standard input; answers with its digest and the seconds it took."""
    store = WeightStore()
    weights = named_weights(load_causal_lm(job.actor.model, "actor"))
    async with serving(store):
        async for version in commands():
            for tensor in weights.values():
                tensor.uniform_()
            store.clear("the next one comes")
            begun = time.monotonic()
            held = PublishedWeights(version, weights).holding
            store.put(held)
            answer(digest=held.digest, bytes=held.num_bytes, seconds=time.monotonic() - begun)


async def replicate(job: JobConfig) -> None:
    """Takes a version for each line of standard input; answers with the moment when it was in use."""
    store = WeightStore()
    worker = RolloutWorker(job)
    model = cast(HfEngine, worker._engine).model
    elsewhere: set[int] = set()  # processes whose memory is not of this machine
    open_region = WeightRegion.open

    def open_near(shared: SharedRegion, num_bytes: int) -> WeightRegion | None:
        return None if int(shared.path.split("/")[2]) in elsewhere else open_region(shared, num_bytes)

    WeightRegion.open = open_near  # type: ignore[method-assign]
    async with serving(store):
        requests = commands()
        async for request in requests:
            store.clear("begun anew")
            elsewhere.clear()
            elsewhere.update(request["elsewhere"])
            if not request["sources"]:
                answer()
                continue
            before = received()
            source = RemoteWeights(request["sources"], request["version"], request["digest"], store=store)
            await source.fetch()
            arrived = time.monotonic()
            await worker.update_weights(source)
            in_use = time.monotonic()
            answer(arrived=arrived, in_use=in_use, bytes=received() - before)
            await anext(requests)  # to read: not before the last one has them in use
            for weight in named_weights(model).values():
                weight.sum()
            answer(read=time.monotonic())


def received() -> float:
    """Bytes of weights that this process has taken, from whomever."""
    samples = next(iter(metrics.WEIGHTS_RECEIVED_BYTES.collect())).samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def answer(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Process:
    """A holder or a replica."""

    def __init__(self, task: str, model: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.weights", "--task", task, "--model", str(model)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._process.pid

    @cached_property
    def address(self) -> str:
        """Where it serves, once it does."""
        return self._line()

    def cpu_seconds(self) -> float:
        """Of all threads since the process began, in steps of 10 ms."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def tell(self, words: Any) -> None:
        print(json.dumps(words), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self._line()))

    def _line(self) -> str:
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended before it answered")
        return line.strip()

    def stop(self) -> None:
        self._process.communicate()


# ------------------------------------------------------------------------------------------ run


class Bench:
    def __init__(self, model: Path) -> None:
        self._holder = Process("hold", model)
        self._replicas = [Process("replicate", model) for _ in range(max(NUM_REPLICAS))]
        for process in (self._holder, *self._replicas):
            assert process.address
        self._version = 0
        self.num_bytes = 0

    def turn(self, way: str, num_replicas: int) -> dict[str, float]:
        """Seconds until the last replica had everything, and used it."""
        self._forget()
        self._version += 1
        self._holder.tell(self._version)
        published = self._holder.answer()
        self.num_bytes = published["bytes"]
        used = self._replicas[:num_replicas]
        far: dict[str, list[Process]] = {"memory": [], "first by network": [self._holder]}
        cpu = sum(process.cpu_seconds() for process in (self._holder, *used))
        begun = time.monotonic()
        for i, replica in enumerate(used):
            relays = [] if way == "star" else [relay.address for relay in reversed(used[:i])]
            replica.tell(
                {
                    "sources": [*relays, self._holder.address],
                    "elsewhere": [process.pid for process in far.get(way, [self._holder, *used])],
                    "version": self._version,
                    "digest": published["digest"],
                }
            )
        answers = [replica.answer() for replica in used]
        assert all(found["bytes"] == self.num_bytes for found in answers)
        taken = {key: max(found[key] for found in answers) - begun for key in ("arrived", "in_use")}
        taken["sync"] = published["seconds"] + taken["in_use"]
        taken["cpu"] = sum(process.cpu_seconds() for process in (self._holder, *used)) - cpu
        read_begun = time.monotonic()
        for replica in used:
            replica.tell("read")
        return {**taken, "read": max(replica.answer()["read"] for replica in used) - read_begun}

    def _forget(self) -> None:
        for replica in self._replicas:
            replica.tell({"sources": [], "elsewhere": []})
        for replica in self._replicas:
            replica.answer()

    def stop(self) -> None:
        for process in (self._holder, *self._replicas):
            process.stop()


def measure(repeats: int, console: Console) -> dict[str, Any]:
    with TemporaryDirectory() as directory:
        model = make_tiny_model(directory, hidden_size=1024, num_layers=4, num_heads=16)
        return _measure(repeats, console, Bench(model))


def _measure(repeats: int, console: Console, bench: Bench) -> dict[str, Any]:
    turns: dict[tuple[str, int], list[dict[str, float]]] = {
        (way, count): [] for way in WAYS for count in NUM_REPLICAS
    }
    for repeat in range(repeats + 1):
        for (way, count), taken in turns.items():
            with console.status(f"turn {repeat} of {repeats}: {way}, {count}"):
                turn = bench.turn(way, count)
            if repeat:  # the first one warms up
                taken.append(turn)
    bench.stop()
    result: dict[str, Any] = {"cores": os.cpu_count(), "bytes": bench.num_bytes}
    for way in WAYS:
        result[way] = {}
        for count in NUM_REPLICAS:
            one, many = (statistics.median(turn["sync"] for turn in turns[way, n]) for n in (1, count))
            row: dict[str, float] = {}
            for key in ("sync", "arrived", "in_use", "read", "cpu"):
                seconds = [turn[key] for turn in turns[way, count]]
                row |= {f"{key}_min_s": min(seconds), f"{key}_median_s": statistics.median(seconds)}
            result[way][str(count)] = {**row, "times_one_replica": many / one}
    return result


def show(result: dict[str, Any], console: Console) -> None:
    keys = ("sync_min", "sync_median", "arrived_median", "in_use_median", "read_median", "cpu_median")
    table = Table("way", "replicas", *(key.replace("_", " ") for key in keys), "x one", title="seconds")
    for way in WAYS:
        for count, row in result[way].items():
            numbers = (f"{row[f'{key}_s']:.3f}" for key in keys)
            table.add_row(way, count, *numbers, f"{row['times_one_replica']:.2f}")
    console.print(table)
    console.print("wanted: 8 local replicas <= 1.3 x one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--task", choices=("hold", "replicate"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        allocator.tune()
        job = job_of(arguments.model)
        asyncio.run(hold(job) if arguments.task == "hold" else replicate(job))
        return
    console = Console(width=110)
    result = measure(arguments.repeats, console)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    show(result, console)


if __name__ == "__main__":
    main()
