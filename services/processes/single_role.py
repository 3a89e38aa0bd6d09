"""Runs one role of a job on this machine, in the same processes as in a run, and work that calls it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rich.console import Console

from rolemesh.config import JobConfig
from rolemesh.rpc.calling.clients import RoleClient
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.processes.launch import beside, check_engine, check_memory, check_models, log_to
from rolemesh.services.processes.role_processes import RoleProcesses, role_processes
from rolemesh.wire.allocator import tune

R = TypeVar("R")


async def with_role(role: str, job: JobConfig, work: Callable[[Any], Coroutine[Any, Any, R]]) -> R:
    """Start the processes of one role, do the work with its client, end the processes, and return the result.

    Placement, ranks and replicas are those of the whole job. Logs are in <run directory>/logs.

    Args:
        role: its name.
        job: the job.
        work: takes the client, when the replicas are ready.

    Raises:
        RolemeshError: the role cannot be started, its last replica was lost, or the work failed.
    """
    tune()
    check_models(job, (role,))
    if role == "rollout":
        check_engine(job)
    check_memory(job, (role,))
    log_to(Console(stderr=True))
    async with role_processes(job, (role,)) as processes:
        return await beside(processes, _work(role, job, processes, work))


async def _work(
    role: str, job: JobConfig, processes: RoleProcesses, work: Callable[[Any], Coroutine[Any, Any, R]]
) -> R:
    addresses = await processes.addresses(job.trainer.ready_timeout_s)
    client: RoleClient = new_client(role, addresses[role], job)
    async with client:
        await until_ready([client], job.trainer.ready_timeout_s)
        return await work(client)
