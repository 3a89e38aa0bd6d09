"""A job that cannot fit is refused before anything starts. Only what is certain counts: weights, and where a
role trains gradients and moments. Activations and caches depend on more than a plan knows."""

from __future__ import annotations

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.planner.devices import human_size
from rolemesh.planner.memory import FLOAT32, WIDTH, Memory, Shapes
from rolemesh.planner.plan import TRAINED, Grouping


def least_memory(job: JobConfig, role: str, shapes: Shapes) -> Memory:
    """Bytes without which a role cannot do its part of a step."""
    if role not in shapes:
        return Memory()
    shape = shapes[role]
    if role == "rollout":
        width = FLOAT32 if job.rollout.name == "hf" else WIDTH[job.rollout.dtype]
        return Memory(weights=width * shape.policy_parameters)
    whole = FLOAT32 * (shape.score_parameters if role in ("critic", "reward") else shape.policy_parameters)
    if role not in TRAINED or job.trainer.val_only:
        return Memory(weights=whole)
    adapts = role == "actor" and job.actor.model.lora_rank > 0
    learnt = FLOAT32 * shape.trained_parameters(job.actor.model) if adapts else whole
    return Memory(weights=whole + adapts * learnt, gradients=learnt, optimizer=2 * learnt)


def refuse_what_cannot_fit(
    job: JobConfig, shapes: Shapes, grouping: Grouping, memory_bytes: int, where: str
) -> None:
    """Groups run beside each other, roles of a group take turns.

    Args:
        grouping: of the roles of the job; a group that has replicas comes as often.
        memory_bytes: of all devices that the groups run on.
        where: what that is, for the message: "this machine's free memory".

    Raises:
        InvalidConfig: how much it takes at least, what the largest part is and what to lower.
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
    key = {"rollout": "actor.model.path", "reward": "reward.reward_model.model.path"}.get(
        role, f"{role}.model.path"
    )
    turns = _least(job, shapes, {"all": [role for roles in grouping.values() for role in roles]})
    advice = f"a smaller model in {key}"
    if turns < needed:
        advice += (
            f", or roles that take turns (placement.strategy=collocate needs at least {human_size(turns)})"
        )
    raise InvalidConfig(
        f"the job takes at least {human_size(needed)}, and {where} is {human_size(memory_bytes)}. "
        f"The largest part is the {role}'s {part}, {human_size(largest)}. What would help: {advice}. "
        "`rolemesh plan` shows every part"
    )


def _least(job: JobConfig, shapes: Shapes, grouping: Grouping) -> int:
    return sum(
        max((least_memory(job, role, shapes).total for role in roles), default=0) for roles in grouping.values()
    )
