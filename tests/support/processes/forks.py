"""Processes forked from one that has imported what is slow to import, 6 s of CPU each.

The server that forks is one for each test process, and so is its list of imports.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from rolemesh.services.processes.fork_server import Forked, ForkServer

IMPORTED = [
    *("torch.distributed.fsdp", "torch._dynamo"),
    *("transformers.modeling_utils", "transformers.models.qwen2.modeling_qwen2"),
    *("rolemesh.models.lora", "rolemesh.models.heads", "rolemesh.services.processes.serve", "peft"),
    *(
        f"rolemesh.services.{role}.{part}"
        for role in ("actor", "critic", "reward", "rollout", "environment")
        for part in ("worker", "servicer")
    ),
    *("rolemesh.rpc.calling.clients", "rolemesh.python_interface"),
]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([*IMPORTED, "pytest"])

OWN = {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}  # of every command
BEGAN_WITH = {**os.environ, **OWN}
FREE = ("PYTEST_", "PYGAME_", "KINETO_")  # variables that may differ; two are set where they are read
LINE_BYTES = 2**20


class Command:
    """A `rolemesh` command, like asyncio.subprocess.Process; its output and errors are one pipe."""

    def __init__(
        self,
        process: Forked | asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        close_stdin: Callable[[], None],
    ) -> None:
        self._process = process
        self.stdout = self.stderr = output
        self.stdin = SimpleNamespace(close=close_stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        return await self._process.wait()

    async def communicate(self) -> tuple[bytes, bytes]:
        """Wait for the end, and return all that is left of the output, twice; it is one pipe."""
        output = await self.stdout.read()
        await self.wait()
        return output, output


def fork_calling(target: Callable[..., None], *arguments: Any) -> Any:
    """Make a process of multiprocessing that calls target(*arguments). Start it yourself."""
    return FORKS.Process(target=_call, args=(target, *arguments))


def _call(target: Callable[..., None], *arguments: Any) -> None:
    gc.freeze()  # a garbage collection would write to all that was imported, and so copy it
    target(*arguments)


async def start(*arguments: str) -> Command:
    """Start `rolemesh ARGUMENTS` with one thread, as a fork of a process that has imported.

    If the environment is not that with which this test process began, it is a process of its own instead: a
    library may read a variable at its import.
    """
    environment = {**os.environ, **OWN}
    changed = {name for name, _ in environment.items() ^ BEGAN_WITH.items()}
    if any(not name.startswith(FREE) for name in changed):
        return await executed(*arguments)
    reading, writing = os.pipe()
    pipe = os.fdopen(reading, "rb")
    try:
        forked = await own_server().fork(arguments, environment, writing)
    except BaseException:
        pipe.close()
        raise
    finally:
        os.close(writing)
    output = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), pipe)
    return Command(forked, output, forked.close_stdin)


async def executed(*arguments: str) -> Command:
    """Start `rolemesh ARGUMENTS` with one thread as a process of its own, as a user does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rolemesh", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **OWN},
        limit=LINE_BYTES,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return Command(process, process.stdout, process.stdin.close)


@cache
def own_server() -> ForkServer:
    """The server of this test process."""
    server = server_process(IMPORTED)
    atexit.register(server.close)
    return server


def server_process(modules: Sequence[str]) -> ForkServer:
    """Start a server of forks, as a process of its own: this one has threads and channels."""
    own, its = socket.socketpair()
    code = (
        "import socket, sys\n"
        "from rolemesh.services.processes.fork_server import serve_forks\n"
        "serve_forks(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])"
    )
    command = [sys.executable, "-P", "-c", code, str(its.fileno()), *modules]
    process = subprocess.Popen(command, pass_fds=[its.fileno()], env=BEGAN_WITH)
    its.close()
    return ForkServer(own, process.pid)
