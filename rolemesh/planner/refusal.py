"""Refuses a job that cannot fit, before anything starts.

Only certain needs count: weights, and gradients and moments of trained roles. Activations and caches depend on
more than a plan knows.
"""

from __future__ import annotations

from rolemesh.catalog.roles import ROLES
from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.planner.devices import human_size
from rolemesh.planner.memory import FLOAT32, WIDTH, Memory, Shapes
from rolemesh.planner.plan import Grouping


def least_memory(job: JobConfig, role: str, shapes: Shapes) -> Memory:
    """Return the bytes without which a role cannot do its part of a step."""
    if role not in shapes:
        return Memory()
    shape = shapes[role]
    if role == "rollout":
        width = WIDTH[job.rollout.dtype] if job.engine.reserves_memory else FLOAT32
        return Memory(weights=width * shape.policy_parameters)
    whole = FLOAT32 * shape.parameters(scores=ROLES[role].scores)
    if not ROLES[role].trained or job.trainer.val_only:
        return Memory(weights=whole)
    adapts = role == "actor" and job.actor.model.lora_rank > 0
    learnt = FLOAT32 * shape.trained_parameters(job.actor.model) if adapts else whole
    return Memory(weights=whole + adapts * learnt, gradients=learnt, optimizer=2 * learnt)


def refuse_what_cannot_fit(
    job: JobConfig, shapes: Shapes, grouping: Grouping, memory_bytes: int, where: str
) -> None:
    """Refuse groups that need more memory than there is. Groups run side by side; roles of a group take turns.

    Args:
        job: the job.
        shapes: by role.
        grouping: of the job's roles, with one entry for each replica of a group.
        memory_bytes: of all devices that the groups run on.
        where: name of that memory for the message, e.g. "this machine's free memory".

    Raises:
        InvalidConfig: they do not fit; the message has the needed bytes, the largest part and what to change.
    """
    needed = _least(job, shapes, grouping)
    if needed <= memory_bytes:
        return
    sizes = {
        (role, part): size
        for roles in grouping.values()
        for role in roles
        for part, size in least_memory(job, role, shapes).parts().items()
    }
    (role, part), largest = max(sizes.items(), key=lambda item: item[1])
    turns = _least(job, shapes, {"all": [role for roles in grouping.values() for role in roles]})
    advice = f"a smaller model in {ROLES[role].model_key}.path"
    if turns < needed:
        advice += (
            f", or roles that take turns (placement.strategy=collocate needs at least {human_size(turns)})"
        )
    raise InvalidConfig(
        f"the job takes at least {human_size(needed)}, but {where} is {human_size(memory_bytes)}. "
        f"The largest part is the {role}'s {part}, {human_size(largest)}. Use {advice}. "
        "`rolemesh plan` shows every part"
    )


def _least(job: JobConfig, shapes: Shapes, grouping: Grouping) -> int:
    return sum(
        max((least_memory(job, role, shapes).total for role in roles), default=0) for roles in grouping.values()
    )
