"""Role processes of this machine: started, watched, and ended together.

There is one for each group of roles, or as many as the group has replicas. A role process holds the reading
end of a pipe whose writing end the launcher holds. The launcher's end,
even by kill -9, closes the pipe, and the role ends itself: no process stays behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rolemesh.config import JobConfig
from rolemesh.errors import RoleUnavailable
from rolemesh.models.loading import resolve_device

log = logging.getLogger(__name__)

GRACE_S = 10.0  # from SIGTERM to SIGKILL
STATELESS = ("rollout", "reference", "reward")  # a replica of these may die while another lives


@dataclass
class RoleProcess:
    """One replica of one group."""

    roles: tuple[str, ...]
    name: str
    process: asyncio.subprocess.Process
    gone: asyncio.Future[None]  # it, and whatever it started
    log_file: Path
    address_file: Path
    address: str = ""
    metrics_address: str = ""

    def fate(self) -> str:
        """Name, how it ended, and the last words of its log."""
        return f"{self.how_ended()}; the end of {self.log_file}:\n{self._last_lines()}"

    @property
    def is_stateless(self) -> bool:
        return set(self.roles) <= set(STATELESS)

    def how_ended(self) -> str:
        """Name, roles where it has several, and how it ended."""
        code = self.process.returncode
        ended = "still runs"
        if code is not None:
            ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        roles = f"with {', '.join(self.roles)}, " if len(self.roles) > 1 else ""
        return f"{self.name} ({roles}pid {self.process.pid}) {ended}"

    def _last_lines(self, count: int = 15) -> str:
        with self.log_file.open("rb") as file:
            file.seek(max(0, self.log_file.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-count:]) or "  | (empty)"


class RoleProcesses:
    """All role processes of one job, in a directory for their addresses and logs."""

    def __init__(self, members: list[RoleProcess]) -> None:
        self.members = members

    async def addresses(self, timeout_s: float) -> dict[str, list[str]]:
        """Each role's addresses, once every process has bound its port.

        Raises:
            RoleUnavailable: a process ended before, or did not bind in time.
        """
        found: dict[str, list[str]] = {}
        try:
            async with asyncio.timeout(timeout_s):
                for member in self.members:
                    bound = await self._bound(member)
                    member.address, member.metrics_address = bound["address"], bound["metrics"]
                    for role in member.roles:
                        found.setdefault(role, []).append(member.address)
        except TimeoutError:
            waiting = [m for m in self.members if not m.address_file.exists()]
            raise RoleUnavailable(
                f"did not begin to serve within {timeout_s:.0f} s: " + "\n".join(m.fate() for m in waiting)
            ) from None
        return found

    async def _bound(self, member: RoleProcess) -> Mapping[str, str]:
        while not member.address_file.exists():
            if member.process.returncode is not None:
                raise RoleUnavailable(f"before it was ready, {member.fate()}")
            await asyncio.sleep(0.02)
        bound: dict[str, str] = json.loads(member.address_file.read_text())
        return bound

    def told_of(self, error: RoleUnavailable) -> RoleUnavailable:
        """The error, with the fate of each process whose address it names."""
        named = [member.fate() for member in self.members if member.address and member.address in str(error)]
        return RoleUnavailable("\n".join([str(error), *named]))

    async def watch(self) -> None:
        """Returns never: raises when a role has lost its last replica.

        Raises:
            RoleUnavailable: which process, how it ended and its last log lines.
        """
        waits = {asyncio.shield(m.gone): m for m in self.members}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in done:
                    member = waits.pop(wait)
                    others = [m for m in waits.values() if m.roles == member.roles]
                    if not member.is_stateless or not others:
                        raise RoleUnavailable(member.fate())
                    # the run goes on: a line, and where to read more
                    log.warning(
                        "%s; the run goes on with %s (log: %s)",
                        member.how_ended(),
                        ", ".join(other.name for other in others),
                        member.log_file,
                    )
        finally:
            for wait in waits:
                wait.cancel()

    async def end(self) -> None:
        """SIGTERM to all, SIGKILL to those that have not drained after the grace. Returns when all are gone."""
        for member in self.members:
            if member.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    member.process.terminate()
        waits = [member.gone for member in self.members]
        if waits:
            _, late = await asyncio.wait(waits, timeout=GRACE_S)
            for member in self.members:
                if member.gone in late:
                    log.warning("%s did not drain within %.0f s and is killed", member.name, GRACE_S)
                    with contextlib.suppress(ProcessLookupError):
                        member.process.kill()
            await asyncio.gather(*waits)


@contextlib.asynccontextmanager
async def role_processes(job: JobConfig) -> AsyncIterator[RoleProcesses]:
    """Starts every group of a job's roles, as many replicas as placement.replicas says, and ends them all on
    the way out. Logs are in `<run directory>/logs/<group>-<index>.log`."""
    directory = job.run_dir / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "job.yaml"
    config.write_text(job.to_yaml(), encoding="utf-8")
    processes = RoleProcesses([])
    try:
        gpus = gpus_by_process(job, visible_gpus(job))
        for name, roles in members_of(job).items():
            processes.members.append(await _start(roles, name, directory, config, gpus[name]))
        yield processes
    finally:
        await asyncio.shield(processes.end())


def members_of(job: JobConfig) -> dict[str, tuple[str, ...]]:
    """The processes of a job, in the order in which they are started, and the roles of each."""
    return {
        f"{group}-{i}": roles for group, roles in job.groups.items() for i in range(job.num_replicas(group))
    }


def visible_gpus(job: JobConfig) -> list[str]:
    """The GPUs of this machine that the job may use, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    if resolve_device(job.trainer.device).type != "cuda":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]


def gpus_by_process(job: JobConfig, gpus: Sequence[str]) -> dict[str, list[str]]:
    """Which GPUs each process gets: the next one (an engine of several ranks so many), and when all have been
    given out, from the first again. A process without a model on a device gets none."""
    given: dict[str, list[str]] = {}
    turn = 0
    for name, roles in members_of(job).items():
        ranks = job.rollout.tensor_model_parallel_size if "rollout" in roles else 1
        count = min(ranks, len(gpus)) if any(job.on_device(role) for role in roles) else 0
        given[name] = [gpus[(turn + i) % len(gpus)] for i in range(count)]
        turn += count
    return given


async def _start(
    roles: tuple[str, ...], name: str, directory: Path, config: Path, gpus: Sequence[str]
) -> RoleProcess:
    log_file, address_file = directory / f"{name}.log", directory / f"{name}.address.json"
    address_file.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-P", "-m", "rolemesh", "serve", ",".join(roles)),
        *("--config", str(config), "--exit-with-parent"),
        *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--address-file", str(address_file)),
    ]
    with log_file.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,  # never written to: its end tells the role that we are gone
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=role_environment() | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which drains the roles
        )
    gone = asyncio.ensure_future(_gone(process))
    return RoleProcess(roles, name, process, gone, log_file, address_file)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Waits for a process, and kills what it has left in its process group: an engine's processes end with
    their role's by themselves, but not in the first seconds of their lives."""
    await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def role_environment() -> dict[str, str]:
    """The environment of a role process. Threads that spin at barriers ruin several processes on few cores."""
    return {
        "OMP_NUM_THREADS": str(os.cpu_count() or 1),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
    }
