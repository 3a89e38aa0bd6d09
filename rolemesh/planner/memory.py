"""Estimates the bytes that a role needs on its device.

The model follows Rolemesh's trainers. Trained weights are float32. bfloat16 is the type of matrix products
(torch.autocast), which keeps a copy of each matrix during a pass. Gradients are float32, and AdamW has two
float32 moments. So a trained parameter takes 16 bytes. A parameter of a role that is not trained takes 2 in
bfloat16, and has no copy. With an adapter, all of the policy's own parameters are frozen. They take 4 bytes, or
2 if they were saved in bfloat16.

Rows are assumed to have the full length S = P + T, with or without padding. The allocator's fragmentation and
kernels' scratch memory are not counted. A GPU's context is not in any role's memory (Device.usable_bytes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.model import TrainedModelConfig
from rolemesh.models.chunks import BLOCK_BYTES, LEARNT_BYTES, tokens_at_once, tokens_in_block
from rolemesh.planner.activations import (
    FLOAT32,
    WIDTH,
    cast_bytes,
    cast_parts,
    forward_bytes,
    gathered_bytes,
    last_bytes,
    passing_bytes,
    peak_with_gathered_bytes,
)
from rolemesh.planner.collectives import Spread
from rolemesh.planner.device_specs import ASLEEP_BYTES, CONTEXT_BYTES, GIB, Device
from rolemesh.planner.shapes import ModelShape, read_shape

# vLLM's CUDA graphs take 0.3 to 2 GiB, depending on the number of sizes and layers; this is the upper end.
GRAPHS_BYTES = 2 * GIB


@dataclass(frozen=True)
class Memory:
    """Peak bytes of one role on one device.

    Args:
        weights: of the model; on a CPU also of the version that is published or fetched.
        gradients: during an update.
        optimizer: AdamW's moments.
        activations: of a micro-batch, with logits and autocast's copies; or of sampling.
        kv_cache: keys and values of the rows that are decoded at once, and of turns that may be continued.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @property
    def changed(self) -> int:
        """Bytes that an update changes, so that a sleep copies them to the host: learnt weights and moments."""
        return self.gradients + self.optimizer

    def parts(self) -> dict[str, int]:
        """Return the parts by name, in the order of declaration."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Shapes = Mapping[str, ModelShape]


def role_shapes(job: JobConfig, roles: Sequence[str] = ()) -> Shapes:
    """Read the shape of the model of each role that loads one; with `roles`, only of these roles.

    A reward by rules has no model, nor has a rollout that uses other servers.

    Raises:
        ModelNotFound: a directory is missing or does not describe a model.
    """
    models = {role: job.model_of(role) for role in roles or job.roles if job.on_device(role)}
    read: dict[tuple[str, str], ModelShape] = {}
    for role, model in models.items():
        if (model.path, model.revision) not in read:
            read[model.path, model.revision] = read_shape(model, role)
    return {role: read[model.path, model.revision] for role, model in models.items()}


def role_memory(job: JobConfig, role: str, shapes: Shapes, device: Device, ranks: int = 1) -> Memory:
    """Return the memory that a role needs on each of its devices.

    Args:
        job: the job.
        role: the role.
        shapes: by role; a role without an entry needs no memory.
        device: the kind of device.
        ranks: of the role's group. A rollout has a whole replica on each device.
    """
    if role not in shapes:
        return Memory()
    job = job.with_dtypes(device.kind)
    shape = shapes[role]
    spread = Spread.of(job, role, ranks)
    if role == "rollout":
        return vllm_memory(job, shape, device) if job.engine.reserves_memory else hf_memory(job, shape, device)
    tokens = -(-tokens_of_pass(job, role) // spread.together)
    on_device = 0 if spread.is_offloaded and not device.shared else 1
    if role == "actor":
        # log-softmax and the gradients of gather and log-softmax; with an entropy bonus also exp and product
        head = logits_bytes(job, role, shape, device, copies=4 if job.actor.entropy_coeff == 0 else 5)
        learnt = shape.trained_parameters(job.actor.model)
        policy = shape.policy_parameters
        casts = (0, 0) if is_base_held(job, shape, ranks) else cast_parts(shape, job.actor.model.dtype, spread)
        passing = passing_bytes(shape, job.actor.model, tokens, head, casts, shared=device.shared)
        memory = trained(learnt, policy, shape, job.actor.model, passing, spread, on_device)
        scoring = scoring_bytes(job, role, shape, tokens, device, ranks)  # when there are no gradients
        memory = replace(memory, activations=max(memory.activations, scoring - memory.gradients))
        if job.actor.model.lora_rank:
            base = on_device * base_bytes(job, shape, ranks) // spread.shards
            memory = replace(memory, weights=memory.weights + base)
        if not device.shared:
            return memory
        # On a CPU the published version is in the same memory; rank 0 holds what all ranks have written.
        return replace(memory, weights=memory.weights + published_width(job) * policy // ranks)
    if role == "critic":
        scored = shape.score_parameters
        model = job.critic_model
        casts = (cast_parts(shape, model.dtype, spread)[0], 0)
        passing = passing_bytes(shape, model, tokens, 0, casts, shared=device.shared)
        return trained(scored, scored, shape, model, passing, spread, on_device)
    spec = ROLES[role]
    held = frozen_bytes(shape, job.model_of(role).dtype, ranks, scores=spec.scores)
    scoring = scoring_bytes(job, role, shape, tokens, device, ranks)
    return Memory(weights=on_device * held // spread.shards, activations=scoring)


def scoring_bytes(job: JobConfig, role: str, shape: ModelShape, tokens: int, device: Device, ranks: int) -> int:
    """Return the peak bytes of a pass without gradients: activations or logits, casts and gathered weights.

    Args:
        tokens: of a micro-batch on one rank.
        ranks: of the role's group.
    """
    spec = ROLES[role]
    spread = Spread.of(job, role, ranks)
    dtype = job.model_of(role).dtype
    weights = shape.parameters(scores=spec.scores)
    head = 0 if spec.scores else block_of_logits_bytes(job, role, shape, device)
    casts = cast_bytes(shape, dtype, spread)
    if not spec.trained or (role == "actor" and is_base_held(job, shape, ranks)):
        casts = frozen_cast_bytes(shape, dtype, ranks, scores=spec.scores)
    gathered = gathered_bytes(weights, shape, dtype) if spread.shards > 1 else 0
    blocks = forward_bytes(shape, tokens, dtype)
    if device.shared:
        return blocks + head + casts + gathered
    return max(blocks, head + last_bytes(shape, tokens, dtype)) + casts + gathered


def published_width(job: JobConfig) -> int:
    """Return the bytes of a parameter of a published version; no dtype of the job is auto."""
    return WIDTH[job.rollout.dtype] if job.engine.reserves_memory else FLOAT32


def tokens_of_pass(job: JobConfig, role: str) -> int:
    """Return the tokens of a micro-batch of rows with full length.

    If the job limits the tokens of a pass, this is the limit, or all tokens of a step if they are fewer.
    """
    budget = job.max_tokens(role)
    width = job.data.max_prompt_length + job.data.max_response_length
    if budget is None:
        return job.pass_rows(role) * width
    return min(budget, job.data.train_batch_size * job.rollout.n * width)


def frozen_bytes(shape: ModelShape, dtype: str, ranks: int = 1, *, scores: bool) -> int:
    """Return the bytes of the weights of a role that is not trained (rolemesh.models.loading.hold_frozen).

    Experts and norms stay float32. The embedding does, too, if its file has more digits than `dtype`; then a
    head that is tied to it is a copy in `dtype`. If the file's type is not known, it is assumed to be `dtype`.
    With several ranks all that is outside of the blocks stays float32.
    """
    whole = FLOAT32 * shape.parameters(scores=scores)
    saved = FLOAT32 - WIDTH[dtype]
    linear = shape.multiplied_parameters - shape.routed_parameters
    if ranks > 1 or not saved:
        return whole - saved * linear
    table = shape.hidden * shape.vocabulary
    head = 0 if scores else shape.head_parameters
    is_exact = shape.stored in ("", dtype)
    is_copied = not (is_exact or scores or head)
    return whole - saved * (linear + head + is_exact * table) + is_copied * WIDTH[dtype] * table


def is_base_held(job: JobConfig, shape: ModelShape, ranks: int = 1) -> bool:
    """Return whether the actor's frozen weights are held in its dtype (rolemesh.models.loading.hold_base)."""
    model = job.actor.model
    return model.lora_rank > 0 and ranks == 1 and shape.stored == model.dtype


def base_bytes(job: JobConfig, shape: ModelShape, ranks: int = 1) -> int:
    """Return the bytes of the weights below an adapter, of all ranks."""
    if is_base_held(job, shape, ranks):
        return frozen_bytes(shape, job.actor.model.dtype, scores=False)
    return FLOAT32 * shape.policy_parameters


def frozen_cast_bytes(shape: ModelShape, dtype: str, ranks: int = 1, *, scores: bool) -> int:
    """Return the bytes of autocast's copies of the float32 matrices of a role that is not trained."""
    if dtype == "float32":
        return 0
    sharded = 0 if scores else shape.head_parameters
    return WIDTH[dtype] * (shape.routed_parameters if ranks == 1 else sharded)


# ------------------------------------------------------------------------------------ training


def trained(
    learnt: int,
    parameters: int,
    shape: ModelShape,
    model: TrainedModelConfig,
    passing: int,
    spread: Spread,
    on_device: int,
) -> Memory:
    """Return a trained role's memory: 16 bytes a learnt parameter, divided by the ranks, and activations.

    Args:
        learnt: number of parameters that are learnt.
        parameters: of the model.
        shape: the model's.
        model: its section.
        passing: passing_bytes of a micro-batch on one rank.
        spread: over ranks.
        on_device: 1, or 0 if weights, gradients and moments are in host memory.
    """
    if spread.shards > 1:
        passing = peak_with_gathered_bytes(passing, learnt, parameters, shape, model.dtype)
    share = on_device * FLOAT32 * learnt // spread.shards
    # Moments that are fetched for a step come when the activations have gone.
    moments = max(0, 2 * share - passing) if spread.fetches_moments else 2 * share
    return Memory(weights=share, gradients=share, optimizer=moments, activations=passing)


def logits_bytes(job: JobConfig, role: str, shape: ModelShape, device: Device, *, copies: int) -> int:
    """Return the peak bytes of the policy's head: float32 copies of a chunk of the logits."""
    most = 2 * tokens_at_once(shape.vocabulary)
    if not device.shared:
        most = tokens_in_block(shape.vocabulary, device.memory_bytes, LEARNT_BYTES)
    tokens = min(_predicted(job, role), most)
    return copies * tokens * shape.vocabulary * FLOAT32


def block_of_logits_bytes(job: JobConfig, role: str, shape: ModelShape, device: Device) -> int:
    """Return the peak bytes of the policy's head without gradients; a GPU has a larger block."""
    if device.shared:
        return logits_bytes(job, role, shape, device, copies=2)
    tokens = min(_predicted(job, role), tokens_in_block(shape.vocabulary, device.memory_bytes))
    return BLOCK_BYTES * tokens * shape.vocabulary


def _predicted(job: JobConfig, role: str) -> int:
    """Return the tokens of a micro-batch whose logits are computed."""
    width = job.data.max_prompt_length + job.data.max_response_length
    return tokens_of_pass(job, role) * (job.data.max_response_length + 1) // width


# ---------------------------------------------------------------------------------- generation


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * WIDTH[dtype]


def hf_memory(job: JobConfig, shape: ModelShape, device: Device) -> Memory:
    """Return the memory of engine hf.

    It has float32 weights, and a KV cache of full width for the rows of a batch. A turn of a conversation is
    kept for the next one beside that cache, in copies that may fill as much again. All prompts of a batch are
    read at once. Sampling is in float64 (scaled logits, log-softmax, exp and cumulative sum).
    """
    prompt = job.data.max_prompt_length
    response = job.data.max_response_length
    rows = min(job.rollout.rows, job.data.train_batch_size * job.rollout.n)
    reading = forward_bytes(shape, rows * prompt, job.rollout.dtype) + rows * prompt * prompt * FLOAT32
    sampling = rows * shape.vocabulary * 4 * 8
    copies = 2 if device.shared else 1  # on a CPU the fetched version is in the same memory
    caches = 2 if job.rollout.multi_turn.enable else 1
    return Memory(
        weights=copies * FLOAT32 * shape.policy_parameters,
        activations=max(reading, sampling) + cast_bytes(shape, job.rollout.dtype, Spread()),
        kv_cache=caches * rows * (prompt + response) * kv_bytes_per_token(shape, job.rollout.dtype),
    )


def vllm_memory(job: JobConfig, shape: ModelShape, device: Device) -> Memory:
    """Return the memory of engine vllm on one of a replica's tensor_model_parallel_size devices.

    It has its share of the weights in rollout.dtype. The KV cache gets the rest of gpu_memory_utilization; on a
    CPU, at most what max_num_seqs rows need. It must have room for at least one sequence. A GPU's context and
    CUDA graphs take a part of the share, too, but are in no part of the result. On a CPU the version that was
    fetched is in the same memory.
    """
    rollout = job.rollout
    width = job.data.max_prompt_length + job.data.max_response_length
    devices = rollout.tensor_model_parallel_size
    weights = shape.policy_parameters * WIDTH[rollout.dtype] // devices
    tokens = min(rollout.max_num_batched_tokens, rollout.rows * width)
    logits = rollout.rows * shape.vocabulary * FLOAT32 * 2
    activations = (forward_bytes(shape, tokens, rollout.dtype) + logits) // devices
    left = round(rollout.share * device.memory_bytes) - weights - activations
    sequence = width * kv_bytes_per_token(shape, rollout.dtype) // devices
    if device.shared:
        left = min(left, rollout.rows * sequence)
    else:
        left -= CONTEXT_BYTES + (0 if rollout.enforce_eager else GRAPHS_BYTES)
    copies = 2 if device.shared else 1
    return Memory(copies * weights, 0, 0, activations, max(left, sequence))


def asleep_bytes(job: JobConfig, device: Device) -> int:
    """Return the bytes that a rollout keeps on each GPU while other roles of its group compute.

    Without free_cache_engine vLLM keeps all of its share. Engine hf runs in the other roles'
    process, and keeps nothing.
    """
    if device.shared or not job.engine.reserves_memory:
        return 0
    if not job.rollout.free_cache_engine:
        return round(job.rollout.share * device.memory_bytes)
    return ASLEEP_BYTES
