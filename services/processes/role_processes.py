"""Starts, watches and ends the role processes of this machine.

There is one process for each replica of each group of roles, or for each of its ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its __all__

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.plan import Plan, PlannedGroup
from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.ranks.rendezvous import local_store
from rolemesh.services.controller.run.durably import write_durably
from rolemesh.services.processes.environments import role_settings
from rolemesh.services.processes.launchers import (
    HERE,
    LOOPBACK,
    Launcher,
    Process,
    RankSlot,
    rank_environment,
)
from rolemesh.services.processes.ray_cluster import joins_cluster, ray_cluster
from rolemesh.workers import broken_device
from rolemesh.workers.devices import resolve_device

log = logging.getLogger(__name__)

GRACE_S = 10.0  # from SIGTERM to SIGKILL
# Exit codes of a process that did not end because of another one. The others of its group then end with code 1.
CAUSES = {broken_device.EXIT_CODE, *(-number for number in signal.Signals)}


@dataclass
class RoleProcess:
    """One replica of one group, or one of its ranks."""

    roles: tuple[str, ...]
    name: str
    replica: str  # the name of its rank 0
    process: Process
    log_file: Path
    address_file: Path
    address: str = ""
    metrics_address: str = ""

    def exit_report(self) -> str:
        """Return the process's name, how it ended, and the last lines of its log."""
        return f"{self.how_ended()}; the end of {self.log_file}:\n{self._last_lines()}"

    @property
    def is_stateless(self) -> bool:
        """True if the job survives the death of a replica while another one runs."""
        return not any(ROLES[role].trained for role in self.roles)

    def how_ended(self) -> str:
        """Return the process's name, its roles if it has several, and how it ended."""
        code = self.process.returncode
        ended = "is still running"
        if code is not None:
            ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            ended += " (its device is broken)" if code == broken_device.EXIT_CODE else ""
        roles = f"with {', '.join(self.roles)}, " if len(self.roles) > 1 else ""
        return f"{self.name} ({roles}pid {self.process.pid}) {ended}"

    def _last_lines(self, count: int = 15) -> str:
        with self.log_file.open("rb") as file:
            file.seek(max(0, self.log_file.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-count:]) or "  | (empty)"


class RoleProcesses:
    """All role processes of one job."""

    def __init__(self, members: list[RoleProcess]) -> None:
        self.members = members

    async def addresses(self, timeout_s: float) -> dict[str, list[str]]:
        """Wait until every process has bound its port, and return each role's addresses.

        Raises:
            RoleUnavailable: a process ended before it bound its port, or did not bind it in time.
        """
        found: dict[str, list[str]] = {}
        try:
            async with asyncio.timeout(timeout_s):
                for member in self.members:
                    bound = await self._bound(member)
                    member.address = bound["address"]
                    member.metrics_address = bound["metrics"]
                    for role in member.roles if member.address else ():  # only rank 0 has an address
                        found.setdefault(role, []).append(member.address)
        except TimeoutError:
            waiting = [m for m in self.members if not m.address_file.exists()]
            raise RoleUnavailable(
                f"not serving within {timeout_s:.0f} s: " + "\n".join(m.exit_report() for m in waiting)
            ) from None
        return found

    async def _bound(self, member: RoleProcess) -> Mapping[str, str]:
        while not member.address_file.exists():
            if member.process.returncode is not None:
                raise RoleUnavailable(f"before it was ready, {member.exit_report()}")
            await asyncio.sleep(0.02)
        bound: dict[str, str] = json.loads(member.address_file.read_text())
        return bound

    def with_exit_reports(self, error: RoleUnavailable) -> RoleUnavailable:
        """Return the error with the exit report of each process whose address it names."""
        named = [
            member.exit_report() for member in self.members if member.address and member.address in str(error)
        ]
        return RoleUnavailable("\n".join([str(error), *named]))

    async def watch(self) -> None:
        """Watch the processes until a role has lost its last replica, then raise.

        It raises at once if a process with a trained role ends.

        Raises:
            RoleUnavailable: the message has the process, how it ended, and its last log lines.
        """
        waits = {asyncio.shield(m.process.gone): m for m in self.members}
        try:
            while waits:
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                # A rank that was killed, or whose device broke, comes before those that ended because of it.
                for wait in sorted(done, key=lambda wait: _is_consequence(waits[wait])):
                    member = waits.pop(wait)
                    others = [
                        other
                        for other in waits.values()
                        if other.roles == member.roles and other.name == other.replica != member.replica
                    ]
                    if not member.is_stateless or not others:
                        raise RoleUnavailable(member.exit_report())
                    # the run continues, so one line and the log's path are enough
                    log.warning(
                        "%s; the run continues with %s (log: %s)",
                        member.how_ended(),
                        ", ".join(other.name for other in others),
                        member.log_file,
                    )
        finally:
            for wait in waits:
                wait.cancel()

    async def end(self, grace_s: float = GRACE_S) -> None:
        """Send SIGTERM to all processes, SIGKILL after grace_s to the rest, and wait until all have ended."""
        for member in self.members:
            if member.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    member.process.terminate()
        waits = [member.process.gone for member in self.members]
        if waits:
            _, late = await asyncio.wait(waits, timeout=grace_s)
            for member in self.members:
                if member.process.gone in late:
                    log.warning("%s did not drain within %.0f s, killing it", member.name, grace_s)
                    with contextlib.suppress(ProcessLookupError):
                        member.process.kill()
            await asyncio.gather(*waits)


@contextlib.asynccontextmanager
async def role_processes(job: JobConfig, roles: Sequence[str] = ()) -> AsyncIterator[RoleProcesses]:
    """Start every replica of every group of a job's roles, and end all of them on exit.

    placement.replicas has the numbers of replicas, placement.ranks of their ranks. Logs are in
    `<run directory>/logs/<group>-<index>.log`, and `<group>-<index>-rank-<rank>.log` for ranks above 0.

    Args:
        job: the job.
        roles: start only these; empty: all.

    Raises:
        InvalidConfig: this machine has fewer GPUs than the processes need.
    """
    directory = job.run_dir / "logs"
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "job.yaml"
    write_durably(config, job.to_yaml())
    processes = RoleProcesses([])
    stores = []  # each lives as long as its group
    plan = job.plan.only(roles)
    async with launcher_of(
        job, sum(group.ranks for group in plan.replicas.values() if group.ranks > 1)
    ) as launcher:
        try:
            gpus = gpus_by_process(job, visible_gpus(job), roles)
            start = partial(_start, directory, config)
            for name, group in plan.replicas.items():
                if group.ranks == 1:
                    environment = role_settings() | _visible(gpus[name])
                    process = start(HERE, RankSlot(0, 1), name, group.roles, name, environment)
                    processes.members.append(await process)
                    continue
                store, ranks = await rank_slots(launcher, job, group, gpus[name])
                stores.append(store)
                for rank, (slot, environment) in enumerate(ranks):
                    own_name = f"{name}-rank-{rank}" if rank else name
                    process = start(launcher, slot, own_name, group.roles, name, environment)
                    processes.members.append(await process)
            yield processes
        finally:
            await asyncio.shield(processes.end())


@contextlib.asynccontextmanager
async def launcher_of(job: JobConfig, num_ranks: int) -> AsyncIterator[Launcher]:
    """Provide the launcher of a job's ranks, by placement.launcher.

    Args:
        job: the job.
        num_ranks: ranks of all groups that have several, together; 0: no group has, and Ray is not needed.

    Raises:
        InvalidConfig: Ray is not installed.
        RoleUnavailable: Ray did not start, or no cluster answered within trainer.ready_timeout_s.
    """
    if num_ranks and job.placement.launcher == "ray":
        async with ray_cluster(num_ranks, job.trainer.ready_timeout_s) as cluster:
            yield cluster
    else:
        yield HERE


async def rank_slots(
    launcher: Launcher, job: JobConfig, group: PlannedGroup, gpus: Sequence[str]
) -> tuple[Store, list[tuple[RankSlot, dict[str, str]]]]:
    """Reserve a slot for each rank of a group.

    Args:
        launcher: starts the ranks.
        job: the job.
        group: the group.
        gpus: of this machine, one for each rank; empty: the ranks are on a CPU, or Ray finds their GPUs.

    Returns:
        The store where the ranks meet, and the slot and environment variables of each rank.

    Raises:
        RoleUnavailable: there was no room for them in time.
    """
    size = group.ranks
    slots = await launcher.reserve(group.name, size, gpus_by_ray(job), job.trainer.ready_timeout_s)
    store = local_store(size, launcher.address)
    ranks = []
    for rank, slot in enumerate(slots):
        found = rank_environment(rank, size, slot, launcher.address, store.port)
        ranks.append((slot, role_settings(slot.local_size) | _visible(gpus[rank : rank + 1]) | found))
    return store, ranks


def visible_gpus(job: JobConfig) -> list[str]:
    """Return the GPUs of this machine that the job may use, as in CUDA_VISIBLE_DEVICES; empty on a CPU."""
    if resolve_device(job.trainer.device).type != "cuda":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]


def gpus_by_ray(job: JobConfig) -> int:
    """Return how many GPUs Ray finds for each rank; 0: the launcher assigns those of this machine."""
    return int(joins_cluster(job) and resolve_device(job.trainer.device).type == "cuda")


def gpus_by_process(job: JobConfig, gpus: Sequence[str], roles: Sequence[str] = ()) -> dict[str, list[str]]:
    """Assign GPUs to replicas of groups, in order. No GPU has two processes, which would not take turns on it.

    A replica gets the devices of its group, or none if Ray finds the GPUs of its ranks.

    Args:
        job: the job.
        gpus: of this machine, which the job may use; empty: it runs on a CPU.
        roles: only these, in the places that they have in the whole job; empty: all.

    Returns:
        Replica to its GPUs.

    Raises:
        InvalidConfig: there are too few GPUs for the ranks of a group or an engine, or for all processes.
    """
    plan = job.plan.only(roles)
    needed: dict[str, int] = {}
    for name, group in plan.replicas.items():
        needed[name] = 0 if group.ranks > 1 and gpus_by_ray(job) else group.devices
        if 0 < len(gpus) < needed[name]:
            key = "placement.ranks" if group.ranks > 1 else "rollout.tensor_model_parallel_size"
            raise InvalidConfig(
                f"{key} is {group.devices} for {', '.join(group.roles)}, but the job may use {len(gpus)} GPUs "
                f"of this machine, and each rank needs its own; lower {key}"
            )
    if gpus and sum(needed.values()) > len(gpus):
        raise _too_few_gpus(job, plan, needed, gpus)
    free = iter(gpus)
    return {name: list(islice(free, count)) for name, count in needed.items()}


def _too_few_gpus(job: JobConfig, plan: Plan, needed: Mapping[str, int], gpus: Sequence[str]) -> InvalidConfig:
    in_turn = [name for name, count in needed.items() for _ in range(count)]
    sharing = in_turn[:: len(gpus)]  # those that would come to the first GPU
    if len({plan.replicas[name].name for name in in_turn}) == 1:
        advice = "set fewer placement.replicas"
    else:
        is_ahead = job.rollout.mode == "async" and job.trainer.max_staleness > 0
        also = " and rollout.mode=sync" if is_ahead else ""
        advice = f"set placement.strategy=collocate{also}, so that all roles take turns"
    return InvalidConfig(
        f"{', '.join(sharing[:-1])} and {sharing[-1]} would share GPU {gpus[0]}, and processes take no turns "
        f"on a GPU: the job needs {len(in_turn)} GPUs, and may use {len(gpus)} of this machine; {advice}"
    )


async def _start(
    directory: Path,
    config: Path,
    launcher: Launcher,
    slot: RankSlot,
    name: str,
    roles: tuple[str, ...],
    replica: str,
    environment: Mapping[str, str],
) -> RoleProcess:
    log_file = directory / f"{name}.log"
    address_file = directory / f"{name}.address.json"
    address_file.unlink(missing_ok=True)
    arguments = [
        "serve",
        ",".join(roles),
        "--config",
        str(config),
        "--exit-with-parent",
        "--listen",
        f"{LOOPBACK}:0",
        "--metrics-listen",
        f"{LOOPBACK}:0",
        "--address-file",
        str(address_file),
    ]
    process = await launcher.start(slot, arguments, environment, log_file)
    return RoleProcess(roles, name, replica, process, log_file, address_file)


def _is_consequence(member: RoleProcess) -> tuple[bool, int]:
    code = member.process.returncode or 0
    return code not in CAUSES, code


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
