"""Plans of a job under every strategy."""

from __future__ import annotations

from dataclasses import replace

from rolemesh.config import JobConfig
from rolemesh.config.placement import strategies
from rolemesh.errors import InvalidConfig
from rolemesh.planner.device_specs import GPUS, Device, available_memory, cpu, parse_size
from rolemesh.planner.estimate import Cluster, Counts, Estimate, Planner, best_first
from rolemesh.planner.memory import role_shapes
from rolemesh.planner.search import search

SEARCHED = "found by search"


def cluster_of(num_gpus: int, gpu: str, memory: str) -> Cluster:
    """Describe a cluster of GPUs of one kind, or this machine's CPU if num_gpus is 0.

    Args:
        num_gpus: number of GPUs.
        gpu: key of GPUS.
        memory: memory of each, e.g. 80GiB; empty: as in GPUS, or the memory that this machine has free.

    Raises:
        InvalidConfig: an unknown kind of GPU, or an invalid size.
    """
    if num_gpus and gpu not in GPUS:
        raise InvalidConfig(
            f"--gpu {gpu} is unknown; expected one of {', '.join(GPUS)} (set another size by --gpu-memory)"
        )
    device: Device = GPUS[gpu] if num_gpus else cpu(available_memory())
    if memory:
        device = replace(device, memory_bytes=parse_size(memory))
    return Cluster(device, max(1, num_gpus))


def make_plans(job: JobConfig, cluster: Cluster, *, searching: bool) -> list[Estimate]:
    """Plan every strategy, and return the plans, best first.

    In the job's own strategy, groups have the replicas and ranks that the job file gives them.

    Args:
        job: the job.
        cluster: the devices.
        searching: also search all groupings, and return the best one if it beats every strategy.
    """
    planner = Planner(job, role_shapes(job), cluster)
    tables = {name: table or job.placement.groups for name, table in strategies().items()}
    given = {job.placement.strategy: given_counts(job)}
    plans = best_first([planner.plan(name, table, given.get(name)) for name, table in tables.items() if table])
    if searching and (found := search(planner, SEARCHED)).order < plans[0].order:
        return [found, *plans]
    return plans


def given_counts(job: JobConfig) -> dict[str, Counts]:
    """Return the replicas and ranks of each group for which the job file sets ranks or several replicas."""
    written = {name for name, count in job.placement.replicas.items() if count > 1} | {*job.placement.ranks}
    return {
        group.name: Counts(group.replicas, group.ranks)
        for group in job.plan.groups
        if written & {group.name, *group.roles} or group.ranks > 1
    }
