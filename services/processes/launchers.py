"""The interface of launchers of ranks, and the launcher for this machine.

A process holds the read end of a pipe, and the launcher holds the write end. If the launcher ends, even by
kill -9, the pipe closes and the process ends itself. So no process is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rolemesh.services.processes import fork_server
from rolemesh.services.processes.environments import inherited
from rolemesh.services.processes.fork_server import Forked

LOOPBACK = "127.0.0.1"


class Process(Protocol):
    """A process of this machine, or of a machine that Ray knows."""

    gone: asyncio.Future[None]  # done when the process and its process group have ended

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: the signal that killed it; None: it runs."""

    def terminate(self) -> None:
        """Send SIGTERM, or raise ProcessLookupError."""

    def kill(self) -> None:
        """Send SIGKILL, or raise ProcessLookupError."""


@dataclass(frozen=True)
class RankSlot:
    """Where a rank runs.

    Args:
        local_rank: its number among the ranks of its group on its machine.
        local_size: number of ranks of its group on its machine.
        actor: Ray's actor, which starts it; None: the launcher starts it.
    """

    local_rank: int
    local_size: int
    actor: Any = None


class Launcher(Protocol):
    """Starts the ranks of groups."""

    address: str  # of this machine, for every rank

    async def reserve(self, group: str, size: int, num_gpus: int, within_s: float) -> list[RankSlot]:
        """Reserve slots for the ranks of a group: rank 0 on this machine, and ranks of a machine in a row.

        Args:
            group: its name.
            size: number of ranks.
            num_gpus: GPUs that the launcher must find for each rank; 0: `start`'s environment names them, if
                any.
            within_s: time limit in seconds.

        Returns:
            The slots by rank.

        Raises:
            RoleUnavailable: there was no room in time; the message names the request and the machines.
        """

    async def start(
        self, slot: RankSlot, arguments: Sequence[str], environment: Mapping[str, str], log_file: Path | None
    ) -> Process:
        """Start `rolemesh ARGUMENTS`.

        Args:
            slot: where.
            arguments: with --exit-with-parent.
            environment: variables in addition to those of its machine.
            log_file: for its output; None: the launcher's own output.

        Raises:
            RoleUnavailable: it could not be started.
        """


class Here:
    """Starts processes on this machine, by the fork server if this process has one."""

    address = LOOPBACK

    async def reserve(self, group: str, size: int, num_gpus: int, within_s: float) -> list[RankSlot]:
        return [RankSlot(rank, size) for rank in range(size)]

    async def start(
        self, slot: RankSlot, arguments: Sequence[str], environment: Mapping[str, str], log_file: Path | None
    ) -> Process:
        environment = inherited() | {**environment}
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(log_file.open("wb")) if log_file else None
            if server := fork_server.server:
                with contextlib.suppress(OSError):  # it was killed
                    written = output.fileno() if output else None
                    # A fork has the launcher's command line; actor-0/1 is rank 1 of actor-0.
                    name = log_file.stem.replace("-rank-", "/") if log_file else ""
                    return LocalProcess(await server.fork(arguments, environment, written, name))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "rolemesh",
                *arguments,
                stdin=asyncio.subprocess.PIPE,  # never written to; it closes when the launcher ends
                stdout=output,
                stderr=asyncio.subprocess.STDOUT if output else None,
                env=environment,
                start_new_session=True,  # Ctrl-C must reach only the launcher, which drains the roles
            )
        return LocalProcess(process)


class LocalProcess:
    """A process of this machine, in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process | Forked) -> None:
        self._process = process
        self.gone: asyncio.Future[None] = asyncio.ensure_future(self._gone())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def close_stdin(self) -> None:
        """Close the write end of its pipe, as happens when the launcher ends."""
        if isinstance(self._process, Forked):
            self._process.close_stdin()
        elif self._process.stdin:
            self._process.stdin.close()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def _gone(self) -> None:
        """Wait for the process to end, then kill the rest of its process group.

        An engine's processes end with their role's process, except in their first seconds.
        """
        await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


HERE = Here()


def rank_environment(rank: int, size: int, slot: RankSlot, host: str, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank.

    Args:
        rank: from 0.
        size: number of ranks.
        slot: where it runs.
        host: address of the group's store, which is on rank 0's machine.
        port: of the store.
    """
    on_loopback = sys.platform == "linux" and host == LOOPBACK
    return {
        **({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if on_loopback else {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(slot.local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
