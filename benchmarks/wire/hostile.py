"""What one hostile message costs a role: how long a health check waits meanwhile, and how much memory is taken.

    python -m benchmarks.wire.hostile [--mib N] [--only WORD]

Starts `rolemesh serve reward` on loopback, sends it each message of hostile_messages.py from another process,
and asks for its health all the while. For each message it prints

- the longest wait for health, and the most that the server computed during one such wait: on a busy machine the
  wait has in it what other programs take, the computing has not;
- the rise of the server's resident memory by this message, and in all since it began to serve. It keeps freed
  memory for later, so only a message that is larger than all before it shows its own cost.

Wanted: a wait below 250 ms on an idle machine, and a rise of at most four times the message (or 64 MiB, which a
small one may take: docs/wire-guarantees.md). Exits with 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from rich.console import Console
from rich.table import Table

from benchmarks.wire import hostile_messages as hostile
from rolemesh.rpc.channels import CLIENT_OPTIONS

WORST_S = 0.25
TIMES = 4
FREE_BYTES = 64 << 20
TINY_FRAMES = "tiny frames"  # the one that is a stream of messages
PLACES = {
    "a batch": hostile.BATCH_METHOD,
    "a health check": hostile.HEALTH_METHOD,
    "reflection": hostile.REFLECTION_METHOD,
}


@dataclass(frozen=True)
class Case:
    """A message: where it is sent, what it is, and of how many bytes (or frames) it is made."""

    place: str
    kind: str
    size: int


def cases(num_bytes: int) -> list[Case]:
    """Every message, of about `num_bytes` bytes."""
    batches = [
        Case("a batch", kind, num_bytes // 9 if kind == "booleans" else num_bytes)
        for kind in hostile.ONE_MESSAGE
    ]
    others = [Case(place, "unknown fields", num_bytes) for place in ("a health check", "reflection")]
    return [*batches, *others, Case("a batch", TINY_FRAMES, 20_000)]


@dataclass(frozen=True)
class Outcome:
    """How a message was answered and what it cost.

    Args:
        answer: the status and what it says; OK if there was none.
        wait_s: the longest that a health check waited.
        computed_s: the most that the server computed during one such wait, on any of its threads.
        cpu_s: that it computed in all.
        rise_bytes: of its resident memory, at its peak, by this message.
        total_rise_bytes: the same, since it began to serve.
    """

    num_bytes: int
    answer: str
    wait_s: float
    computed_s: float
    cpu_s: float
    rise_bytes: int
    total_rise_bytes: int

    @property
    def limit_bytes(self) -> int:
        return max(TIMES * self.num_bytes, FREE_BYTES)


# ----------------------------------------------------------------------------------------------- sender


async def send(address: str) -> None:
    """For each case (a JSON line) says its size, waits for a line, sends it, and says how it was answered."""
    for line in sys.stdin:
        case = Case(**json.loads(line))
        one = None if case.kind == TINY_FRAMES else hostile.ONE_MESSAGE[case.kind](case.size)
        print(4 * case.size if one is None else len(one), flush=True)
        sys.stdin.readline()
        async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
            stream: Any = channel.stream_stream(PLACES[case.place], None, None)
            try:
                async for _ in stream(_messages(one, case.size)):
                    pass
                print("OK", flush=True)
            except grpc.aio.AioRpcError as error:
                print(f"{error.code().name}: {(error.details() or '')[:90]}", flush=True)


async def _messages(one: bytes | None, number: int) -> AsyncIterator[bytes]:
    for message in hostile.tiny_frames(number) if one is None else (one,):
        yield message


# ----------------------------------------------------------------------------------------------- server


class Target:
    """A `rolemesh serve reward` with a tiny model's tokenizer, and who sends to it. It serves when made."""

    def __init__(self, directory: Path) -> None:
        from rolemesh.models.tiny import make_tiny_model  # here: the sender needs no torch

        model = make_tiny_model(directory / "model", "qwen2")
        config = directory / "job.yaml"
        bound = directory / "address.json"
        log = directory / "log"
        config.write_text(
            f"actor: {{model: {{path: {model}}}}}\n"
            f"trainer: {{default_local_dir: {directory / 'run'}, device: cpu}}\n"
        )
        serve = [sys.executable, "-m", "rolemesh", "serve", "reward", "--config", str(config)]
        options = ["--address-file", str(bound), "--exit-with-parent", "--listen", "127.0.0.1:0"]
        self._server = subprocess.Popen(
            [*serve, *options],
            stdin=subprocess.PIPE,
            stderr=log.open("w"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while not bound.exists():
            if self._server.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.02)
        self.address: str = json.loads(bound.read_text())["address"]
        with grpc.insecure_channel(self.address) as channel:
            while not _serves(channel):
                time.sleep(0.02)
        self._sender = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.wire.hostile", "--send-to", self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        self._at_first = self._memory("VmRSS")

    def close(self) -> None:
        for process in (self._sender, self._server):
            process.kill()
            process.communicate()

    async def expose_to(self, case: Case) -> Outcome:
        """Sends it the message and asks for its health until that is answered."""
        self._tell(json.dumps(case.__dict__))
        num_bytes = int(await asyncio.to_thread(self._hear))
        cpu = self.cpu_s()
        before = self._memory("VmRSS")
        self._begin_peak()
        async with grpc.aio.insecure_channel(self.address, options=CLIENT_OPTIONS) as channel:
            health = _Health(HealthStub(channel), self.cpu_s)
            asking = asyncio.create_task(health.ask_again_and_again())
            await health.answered.wait()
            self._tell("go")
            answer = await asyncio.to_thread(self._hear)
            health.answered.clear()
            await health.answered.wait()
            asking.cancel()
        cpu = self.cpu_s() - cpu
        peak = self._memory("VmHWM")
        rises = peak - before, peak - self._at_first
        return Outcome(num_bytes, answer, health.wait_s, health.computed_s, cpu, *rises)

    def cpu_s(self) -> float:
        numbers = Path(f"/proc/{self._server.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def _memory(self, key: str) -> int:
        lines = Path(f"/proc/{self._server.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) << 10

    def _begin_peak(self) -> None:
        Path(f"/proc/{self._server.pid}/clear_refs").write_text("5")

    def _tell(self, line: str) -> None:
        assert self._sender.stdin is not None
        print(line, file=self._sender.stdin, flush=True)

    def _hear(self) -> str:
        assert self._sender.stdout is not None
        return self._sender.stdout.readline().strip()


@contextmanager
def target(directory: Path) -> Iterator[Target]:
    made = Target(directory)
    try:
        yield made
    finally:
        made.close()


def _serves(channel: grpc.Channel) -> bool:
    answer = HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=60)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class _Health:
    def __init__(self, stub: Any, cpu_s: Any) -> None:
        self.wait_s = self.computed_s = 0.0
        self.answered = asyncio.Event()
        self._stub = stub
        self._cpu_s = cpu_s

    async def ask_again_and_again(self) -> None:
        request = health_pb2.HealthCheckRequest(service="live")
        while True:
            begun = time.perf_counter()
            cpu = self._cpu_s()
            await self._stub.Check(request, wait_for_ready=True, timeout=300)
            self.wait_s = max(self.wait_s, time.perf_counter() - begun)
            self.computed_s = max(self.computed_s, self._cpu_s() - cpu)
            self.answered.set()
            await asyncio.sleep(0.002)


# -------------------------------------------------------------------------------------------------- run


async def measure(num_bytes: int, only: str, console: Console) -> bool:
    table = Table(
        "to", "message", "MiB", "answer", "waited ms", "computed ms", "CPU s", "rise MiB", "of", "in all"
    )
    kept = True
    with tempfile.TemporaryDirectory() as directory, target(Path(directory)) as exposed:
        for case in cases(num_bytes):
            if only not in case.kind:
                continue
            outcome = await exposed.expose_to(case)
            bad = outcome.answer == "OK" or outcome.wait_s > WORST_S or outcome.rise_bytes > outcome.limit_bytes
            kept &= not bad
            table.add_row(
                case.place,
                case.kind,
                f"{outcome.num_bytes / hostile.MIB:.1f}",
                outcome.answer[:70],
                f"{outcome.wait_s * 1e3:.0f}",
                f"{outcome.computed_s * 1e3:.0f}",
                f"{outcome.cpu_s:.2f}",
                f"{outcome.rise_bytes / hostile.MIB:.0f}",
                f"{outcome.limit_bytes / hostile.MIB:.0f}",
                f"{outcome.total_rise_bytes / hostile.MIB:.0f}",
                style="red" if bad else "",
            )
    console.print(table)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=62, help="of each message")
    parser.add_argument("--only", default="", help="messages with this word in their names")
    parser.add_argument("--send-to", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send_to:
        asyncio.run(send(arguments.send_to))
    elif not asyncio.run(measure(arguments.mib * hostile.MIB, arguments.only, Console(width=190))):
        sys.exit(1)


if __name__ == "__main__":
    main()
