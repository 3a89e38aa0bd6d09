"""Estimates the host memory of a rollout whose engine computes on GPUs.

A pod is killed if it exceeds its memory limit. The largest part is the version that the rollout has received.
It is kept for other rollouts that pull it from here, and the engine reads it in place. The size of the weights
is known, so a limit below it is refused. The processes' memory is a guess, so a limit below the sum only causes
a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.planner.devices import GIB, human_size
from rolemesh.planner.memory import Shapes, published_width, role_shapes

log = logging.getLogger(__name__)

# Python, libraries and buffers of an engine's processes: of vLLM, of each further GPU of vLLM, and of hf. These
# are guesses, not measured in a pod.
VLLM_BYTES, RANK_BYTES, HF_BYTES = 7 * GIB, 3 * GIB, 3 * GIB


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory of a rollout's pod.

    Args:
        processes: of the engines, without weights; a guess.
        version: the received version, in the dtype in which the actor publishes.
        asleep: weights of sleeping engines.
    """

    processes: int
    version: int
    asleep: int

    @property
    def weights(self) -> int:
        """Bytes that are certainly needed."""
        return self.version + self.asleep

    @property
    def total(self) -> int:
        return self.processes + self.weights


def host_memory(job: JobConfig, shapes: Shapes, roles: Sequence[str], engines: int = 1) -> HostMemory | None:
    """Return the host memory of a pod with a rollout on GPUs; None if no rollout has a model there.

    Args:
        job: the job.
        shapes: by role.
        roles: of the pod. If several have models, the engines sleep in turns.
        engines: number of engines in the pod, one for each rank of a group that trains.
    """
    if "rollout" not in roles or "rollout" not in shapes:
        return None
    sleeps = job.rollout.free_cache_engine and sum(job.on_device(role) for role in roles) > 1
    job = job.with_dtypes("cuda")
    version = published_width(job) * shapes["rollout"].policy_parameters
    if job.engine.reserves_memory:
        processes = VLLM_BYTES + (job.rollout.tensor_model_parallel_size - 1) * RANK_BYTES
    else:
        processes = HF_BYTES
    return HostMemory(engines * processes, version, engines * version if sleeps else 0)


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
    roles = next(roles for roles in job.groups.values() if "rollout" in roles)
    needed = host_memory(job, role_shapes(job, ["rollout"]), roles, engines)
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
