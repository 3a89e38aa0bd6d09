"""Implements `rolemesh serve ROLES` for several ranks: starts all of them, here or by Ray, and watches them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.config.plan import PlannedGroup
from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.services.processes.launchers import HERE
from rolemesh.services.processes.role_processes import (
    GRACE_S,
    RoleProcess,
    RoleProcesses,
    gpus_by_ray,
    launcher_of,
    rank_slots,
    visible_gpus,
)
from rolemesh.services.processes.shutdown import DRAIN_S, LOG_FLUSH_S, Shutdown
from rolemesh.telemetry import context
from rolemesh.telemetry.logs import LogFormat, setup_logging

log = logging.getLogger(__name__)


def spread_group(roles: Sequence[str], job: JobConfig, environment: Mapping[str, str]) -> PlannedGroup | None:
    """Return the group of these roles if this process must start its ranks; None if it serves the roles itself.

    Args:
        roles: of the command line.
        job: the job.
        environment: environment variables; those of a rank have WORLD_SIZE.

    Raises:
        InvalidConfig: some of the roles, or others with them, are a group of several ranks.
    """
    if "WORLD_SIZE" in environment:
        return None
    for group in job.plan.groups:
        if group.ranks == 1 or not {*group.roles} & {*roles}:
            continue
        if {*group.roles} == {*roles}:
            return group
        raise InvalidConfig(
            f"group {group.name} has {group.ranks} ranks (placement.ranks), so its roles are served "
            f"together and without others: rolemesh serve {','.join(group.roles)}. Or choose a "
            f"placement.strategy in which {','.join(roles)} are a group"
        )
    return None


async def serve_ranks(
    group: PlannedGroup,
    job: JobConfig,
    arguments: Sequence[str],
    listen: str,
    *,
    metrics_listen: str | None = None,
    health_listen: str | None = None,
    address_file: Path | None = None,
    exit_with_parent: bool = False,
    drain_s: float = DRAIN_S,
    log_format: LogFormat = "text",
) -> None:
    """Start the ranks of a group, and serve until SIGTERM or SIGINT; a second signal ends the process at once.

    If a rank ends, all end. With Ray, all are then restarted, since nothing else would restart ranks on other
    machines. Otherwise this raises, and the process's own supervisor may restart it.

    Args:
        group: the group.
        job: the job.
        arguments: of `rolemesh`, for every rank.
        listen: host:port of rank 0.
        metrics_listen: host:port of /metrics for the first rank of a machine; the next ranks take the next
            ports.
        health_listen: host:port of health for rank 0.
        address_file: written by rank 0, as by `serve`.
        exit_with_parent: also end when standard input closes.
        drain_s: seconds for running calls after the first signal.
        log_format: of the lines on standard error.

    Raises:
        RoleUnavailable: a rank ended, or could not be started.
    """
    setup_logging(log_format)
    context.role.set(group.name)
    context.job.set(job.trainer.experiment_name)
    shutdown = Shutdown(exit_with_parent, drain_s)

    def of_rank(rank: int, local_rank: int) -> list[str]:
        own = [*arguments, "--exit-with-parent", "--listen", listen]
        if metrics_listen:
            own += ["--metrics-listen", _port_after(metrics_listen, local_rank)]
        if health_listen and rank == 0:
            own += ["--health-listen", health_listen]
        return own + (["--address-file", str(address_file)] if address_file and rank == 0 else [])

    async with launcher_of(job, group.ranks) as launcher:
        while True:
            processes = RoleProcesses([])
            gpus = [] if gpus_by_ray(job) else visible_gpus(job)
            store, ranks = await rank_slots(launcher, job, group, gpus)
            try:
                for rank, (slot, environment) in enumerate(ranks):
                    name = f"rank {rank} of {len(ranks)} of {group.name}"
                    own = of_rank(rank, slot.local_rank)
                    process = await launcher.start(slot, own, environment, None)
                    processes.members.append(RoleProcess(group.roles, name, name, process, Path(), Path()))
                lost = await _first_end(processes, shutdown)
            finally:
                # Rank 0 drains for the same time, and then cancels the calls that still run.
                grace_s = drain_s + LOG_FLUSH_S if shutdown.begun.is_set() else GRACE_S
                await asyncio.shield(processes.end(grace_s))
                del store
            if shutdown.begun.is_set():
                return
            if launcher is HERE:
                raise RoleUnavailable(lost)
            log.warning("%s; starting all ranks anew", lost)


async def _first_end(processes: RoleProcesses, shutdown: Shutdown) -> str:
    """Wait until a rank has ended or a signal asks this process to end. Return which, and how."""
    asked: asyncio.Future[Any] = asyncio.ensure_future(shutdown.begun.wait())
    gone: list[asyncio.Future[Any]] = [asyncio.shield(m.process.gone) for m in processes.members]
    await asyncio.wait([asked, *gone], return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    return ", ".join(m.how_ended() for m in processes.members if m.process.gone.done()) or shutdown.reason


def _port_after(address: str, by: int) -> str:
    """Return the address with its port raised, unless the port is 0, which picks a free one."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + by if int(port) else 0}"
