"""Refuses a rollout on GPUs in a container whose memory limit is too small for its host memory.

A pod is killed if it exceeds its memory limit. The size of the weights is known, so a limit below it is
refused. The processes' memory is a guess, so a limit below the sum only causes a warning.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.planner.device_specs import human_size
from rolemesh.planner.host_memory import host_memory
from rolemesh.planner.memory import role_shapes

log = logging.getLogger(__name__)


def refuse_small_limit(job: JobConfig, limit_bytes: int, engines: int = 1) -> None:
    """Refuse a rollout on a GPU in a container whose memory limit is too small for its weights in host memory.

    If the limit is exceeded only with the guess for its processes, log a warning.

    Args:
        job: the job.
        limit_bytes: of the container.
        engines: number of engines in it, one for each rank of a group that trains.

    Raises:
        InvalidConfig: the limit is too small; the message has the needed bytes.
        ModelNotFound: as role_shapes.
    """
    needed = host_memory(job, role_shapes(job, ["rollout"]), job.plan.of_role("rollout").roles, engines)
    if needed is None or needed.total <= limit_bytes:
        return
    parts = ", ".join(f"{name} {human_size(size)}" for name, size in asdict(needed).items() if size)
    message = (
        f"the rollout takes about {human_size(needed.total)} of host memory ({parts}), but the memory limit of "
        f"this container is {human_size(limit_bytes)}: raise it (roles.rollout.resources in the chart), or use "
        "a smaller model in actor.model.path"
    )
    if needed.weights > limit_bytes:
        raise InvalidConfig(message)
    log.warning("%s. What its processes take is a guess, so it is started", message)
