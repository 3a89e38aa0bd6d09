"""Refuses a job that cannot fit, before anything starts.

Only memory that is certainly needed counts. In a CPU's memory, which all roles share, these are weights, and
gradients and moments of trained roles. A GPU has one process. There the activations of one row count too,
because no smaller micro-batch avoids them, and vLLM must fit into its share of the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.model import TrainedModelConfig
from rolemesh.config.rollout import ROWS
from rolemesh.errors import InvalidConfig
from rolemesh.planner.activations import FLOAT32, WIDTH, block_bytes, forward_bytes
from rolemesh.planner.device_specs import GPUS, human_size
from rolemesh.planner.estimate import Grouping
from rolemesh.planner.memory import (
    Memory,
    Shapes,
    base_bytes,
    frozen_bytes,
    frozen_cast_bytes,
    is_base_held,
    kv_bytes_per_token,
    published_width,
    tokens_of_pass,
    vllm_memory,
)
from rolemesh.planner.shapes import ModelShape

NO_ROOM = replace(GPUS["h100"], memory_bytes=0)  # vLLM's estimate for it has a cache for one sequence


def least_memory(job: JobConfig, role: str, shapes: Shapes) -> Memory:
    """Return the bytes without which a role cannot do its part of a step."""
    if role not in shapes:
        return Memory()
    shape = shapes[role]
    if role == "rollout":
        return Memory(weights=published_width(job) * shape.policy_parameters)
    spec = ROLES[role]
    if not spec.trained:
        return Memory(weights=frozen_bytes(shape, job.model_of(role).dtype, scores=spec.scores))
    whole = FLOAT32 * shape.parameters(scores=spec.scores)
    if job.trainer.val_only:
        return Memory(weights=whole)
    adapts = role == "actor" and job.actor.model.lora_rank > 0
    if not adapts:
        return Memory(weights=whole, gradients=whole, optimizer=2 * whole)
    learnt = FLOAT32 * shape.trained_parameters(job.actor.model)
    return Memory(weights=base_bytes(job, shape) + learnt, gradients=learnt, optimizer=2 * learnt)


def refuse_what_cannot_fit(
    job: JobConfig, shapes: Shapes, grouping: Grouping, memory_bytes: int, where: str
) -> None:
    """Refuse groups that need more memory than there is. Groups run in parallel; roles of a group take turns.

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


# --------------------------------------------------------------------------------------- a GPU


def refuse_what_gpus_cannot_hold(
    job: JobConfig,
    shapes: Shapes,
    grouping: Grouping,
    given: Mapping[str, Sequence[str]],
    memory_bytes: Mapping[str, int],
) -> None:
    """Refuse a process if a role needs more memory than its GPU has, or vLLM more than its share of the GPU.

    Roles of a process take turns. A model that is spread over several ranks is not counted. An engine counts as
    the planner estimates it.

    Args:
        job: the job; no dtype is auto.
        shapes: by role.
        grouping: of the job's roles, with one entry for each replica of a group.
        given: the GPUs of each replica.
        memory_bytes: of each GPU.

    Raises:
        InvalidConfig: one does not fit; the message has the needed bytes, the largest part and what to change.
    """
    for replica, roles in grouping.items():
        whole = roles if len(given[replica]) == 1 else [role for role in roles if role == "rollout"]
        is_alone = sum(role in shapes for role in roles) == 1
        for role in whole:
            for gpu in given[replica]:
                rows = ROWS if is_alone else None  # the fewest that vLLM takes by itself
                decided = job.with_rows_and_share(rows)
                _refuse_on_gpu(decided, role, least_on_gpu(decided, role, shapes), gpu, memory_bytes[gpu])


def _refuse_on_gpu(job: JobConfig, role: str, least: Memory, gpu: str, memory_bytes: int) -> None:
    limit = memory_bytes
    where = f"the memory of GPU {gpu}"
    share = job.rollout.share
    has_share = role == "rollout" and job.engine.reserves_memory
    if has_share:
        limit = round(share * limit)
        where = f"rollout.gpu_memory_utilization {share:g} of {where}"
    if least.total <= limit:
        return
    part, largest = max(least.parts().items(), key=lambda item: item[1])
    enough = math.ceil(100 * least.total / memory_bytes) / 100
    if has_share:
        advice = f"Set it to at least {enough:g}" if enough <= 1 else "Use a smaller model in actor.model.path"
        advice += ", or a smaller rollout.max_num_batched_tokens"
    else:
        advice = f"Use a smaller model in {ROLES[role].model_key}.path"
        if part in ("activations", "kv_cache"):
            lengths = "data.max_prompt_length and max_response_length"
            advice = f"Use shorter rows than {_width(job)} tokens ({lengths})"
        advice += "" if role == "rollout" else ", or more GPUs for it (placement.ranks)"
    raise InvalidConfig(
        f"the {role} takes at least {human_size(least.total)}, but {where} is {human_size(limit)}. "
        f"The largest part is its {part}, {human_size(largest)}. {advice}. `rolemesh plan` shows every part"
    )


def least_on_gpu(job: JobConfig, role: str, shapes: Shapes) -> Memory:
    """Return the bytes without which a role cannot process a row of full length P + T on a GPU of its own.

    For vLLM this is the planner's estimate with a cache for one sequence. For the others it is a lower bound of
    the peak: it leaves out logits, and everything that may be freed by then. In a job that only validates,
    roles other than the rollout count the weights alone.
    """
    least = least_memory(job, role, shapes)
    if role not in shapes or (job.trainer.val_only and role != "rollout"):
        return least
    shape = shapes[role]
    if role == "rollout":
        if job.engine.reserves_memory:
            return vllm_memory(job, shape, NO_ROOM)
        return replace(least, kv_cache=_width(job) * kv_bytes_per_token(shape, job.rollout.dtype))
    model = job.model_of(role)
    if isinstance(model, TrainedModelConfig):
        return _least_of_update(job, role, shape, model, least)
    casts = frozen_cast_bytes(shape, model.dtype, scores=ROLES[role].scores)
    passing = forward_bytes(shape, _width(job), model.dtype) + casts
    return replace(least, activations=passing)


def _least_of_update(
    job: JobConfig, role: str, shape: ModelShape, model: TrainedModelConfig, least: Memory
) -> Memory:
    """Return the bytes of a trained role in its passes, or in the optimizer's step if these are more.

    The first pass of a mini-batch has no gradients yet; a second one has all of them. Autocast's copies are
    freed before blocks are recomputed. With checkpointing, copies of weights below an adapter are not kept
    for the next block.
    """
    checkpoints = model.enable_gradient_checkpointing
    adapts = role == "actor" and job.actor.model.lora_rank > 0
    block = block_bytes(shape, _width(job), model.dtype)
    stored = FLOAT32 * shape.hidden * _width(job) * shape.layers if checkpoints else block * shape.layers
    if model.enable_activation_offload:
        stored = 0
    held = role == "actor" and is_base_held(job, shape)
    casts = 0 if held or (adapts and checkpoints) else _cast_blocks(shape, model.dtype)
    has_gradients = job.mini_batch_size(role) * job.rollout.n * _width(job) > tokens_of_pass(job, role)
    passing = replace(
        least,
        gradients=least.gradients * has_gradients,
        optimizer=0 if job.fsdp_config(role).optimizer_offload else least.optimizer,
        activations=stored + max(casts, block if checkpoints else 0),
    )
    return max(passing, least, key=lambda memory: memory.total)


def _width(job: JobConfig) -> int:
    return job.data.max_prompt_length + job.data.max_response_length


def _cast_blocks(shape: ModelShape, dtype: str) -> int:
    return 0 if dtype == "float32" else WIDTH[dtype] * shape.multiplied_parameters
