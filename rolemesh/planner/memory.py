"""Bytes that a role needs on its device.

What Rolemesh's trainers really do: weights are float32 and stay so; bfloat16 is the type of matrix products
(torch.autocast), which keeps a copy of each matrix for as long as a pass lasts; gradients are float32; AdamW
has two float32 moments. So a trained parameter is 16 bytes, a fixed one 4; where an adapter is trained, all of
the model's are fixed.

Rows are taken to have their whole length S = P + T, whether padding is left out or not. Nothing is counted for
the allocator's gaps, for kernels' scratch or for the CUDA context (about half a GiB).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from rolemesh.config import JobConfig
from rolemesh.config.model import ModelConfig, TrainedModelConfig
from rolemesh.models.chunks import tokens_at_once
from rolemesh.planner.devices import Device
from rolemesh.planner.shapes import ModelShape, read_shape

FLOAT32 = 4
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one role on one device, at their peak.

    Args:
        weights: of the model; on a CPU also the version that is published or fetched.
        gradients: while a step is made.
        optimizer: AdamW's moments.
        activations: of a micro-batch, logits and autocast's copies included; of sampling.
        kv_cache: keys and values of the rows that are decoded at once.
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
    def state(self) -> int:
        """What moves to the host when the role sleeps, and back when it wakes."""
        return self.weights + self.optimizer

    def parts(self) -> dict[str, int]:
        """By name, as they are declared."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


Shapes = Mapping[str, ModelShape]


def role_shapes(job: JobConfig) -> Shapes:
    """The model of each role that has one here; a reward of rules has none, nor a rollout of other servers.

    Raises:
        ModelNotFound: a directory is missing or does not describe a model.
    """
    models: dict[str, ModelConfig] = {"actor": job.actor.model}
    if job.rollout.name != "openai":
        models["rollout"] = job.actor.model
    if "reference" in job.roles:
        models["reference"] = job.reference_model
    if job.uses_critic:
        models["critic"] = job.critic_model
    if job.reward.reward_model.enable:
        models["reward"] = job.reward.reward_model.model
    read: dict[str, ModelShape] = {}
    for role, model in models.items():
        if model.path not in read:
            read[model.path] = read_shape(model, role)
    return {role: read[model.path] for role, model in models.items()}


def role_memory(job: JobConfig, role: str, shapes: Shapes, device: Device, ranks: int = 1) -> Memory:
    """What a role needs on each of its devices.

    Args:
        shapes: by role; a role that is not in it needs nothing.
        ranks: over which a trained role is sharded (FSDP: every rank holds its share of weights, gradients
            and moments, and gathers block by block). Other roles have a whole replica on each device.
    """
    if role not in shapes:
        return Memory()
    shape = shapes[role]
    if role == "rollout":
        return vllm_memory(job, shape, device) if job.rollout.name == "vllm" else hf_memory(job, shape, device)
    tokens = tokens_of_pass(job, role)
    if role == "actor":
        # log-softmax and the gradients of gather and log-softmax; with an entropy bonus exp and product too
        head = logits_bytes(job, role, shape, copies=4 if job.actor.entropy_coeff == 0 else 5)
        learnt = shape.trained_parameters(job.actor.model)
        memory = trained(learnt, shape, job.actor.model, tokens, head, ranks)
        whole = FLOAT32 * shape.policy_parameters // ranks
        if job.actor.model.lora_rank:
            memory = replace(memory, weights=memory.weights + whole)
        # On a CPU the version that is published lies in the same memory.
        return replace(memory, weights=memory.weights + whole) if device.shared else memory
    if role == "critic":
        return trained(shape.score_parameters, shape, job.critic_model, tokens, 0, ranks)
    if role == "reference":
        model, weights = job.reference_model, shape.policy_parameters
        head = logits_bytes(job, role, shape, copies=2)
    else:
        model, weights, head = job.reward.reward_model.model, shape.score_parameters, 0
    passing = forward_bytes(shape, tokens, model.dtype) + autocast_bytes(shape, model.dtype)
    return Memory(weights=FLOAT32 * weights, activations=passing + head)


def tokens_of_pass(job: JobConfig, role: str) -> int:
    """Tokens of a micro-batch whose rows have their whole length; or as many as it may have, if a step's rows
    come to so many."""
    if role == "reward":
        rows, budget = job.reward.reward_model.micro_batch_size_per_gpu, None
    else:
        rows, budget = (
            {
                "actor": job.actor.ppo_micro_batch_size_per_gpu,
                "critic": job.critic.ppo_micro_batch_size_per_gpu,
                "reference": job.reference.log_prob_micro_batch_size_per_gpu,
            }[role],
            job.max_tokens(role),
        )
    width = job.data.max_prompt_length + job.data.max_response_length
    if budget is None:
        return rows * width
    return min(budget, job.data.train_batch_size * job.rollout.n * width)


# ------------------------------------------------------------------------------------ training


def trained(
    num_parameters: int,
    shape: ModelShape,
    model: TrainedModelConfig,
    tokens: int,
    head_bytes: int,
    ranks: int,
) -> Memory:
    """16 bytes a parameter over the ranks, the activations of as many tokens, and a block's gradients on their
    way."""
    block = block_bytes(shape, tokens, model.dtype)
    stored = block * shape.layers
    if model.enable_gradient_checkpointing:  # each block's input, and one block as it is computed again
        stored = FLOAT32 * shape.hidden * tokens * shape.layers + block
    gathered = 2 * FLOAT32 * num_parameters // shape.layers if ranks > 1 else 0  # a block, and the next one
    return Memory(
        weights=FLOAT32 * num_parameters // ranks,
        gradients=FLOAT32 * num_parameters // ranks,
        optimizer=2 * FLOAT32 * num_parameters // ranks,
        activations=stored + block + head_bytes + autocast_bytes(shape, model.dtype) // ranks + gathered,
    )


def block_bytes(shape: ModelShape, tokens: int, dtype: str) -> int:
    """What a block keeps for its backward pass.

    Counted from the operations of a Llama block under autograd: both norms keep their input and the normalised
    input in float32 and what follows them keeps their output; attention keeps q, k, v (of all heads: grouped
    ones are repeated) and its output, not the scores, since the kernel is fused; the MLP keeps gate, its
    activation, up and their product.
    """
    small = WIDTH[dtype]
    norms = 2 * shape.hidden * (2 * FLOAT32 + small)
    attention = 4 * shape.heads * shape.head_dim * small
    mlp = 4 * shape.intermediate * small
    return tokens * (norms + attention + mlp)


def logits_bytes(job: JobConfig, role: str, shape: ModelShape, *, copies: int) -> int:
    """The policy's head at its peak: float32 copies of a chunk of the logits."""
    width = job.data.max_prompt_length + job.data.max_response_length
    predicted = tokens_of_pass(job, role) * (job.data.max_response_length + 1) // width
    return copies * min(predicted, 2 * tokens_at_once(shape.vocabulary)) * shape.vocabulary * FLOAT32


def autocast_bytes(shape: ModelShape, dtype: str) -> int:
    """Copies of the matrices in the type of the products; none in float32."""
    return 0 if dtype == "float32" else (shape.multiplied_parameters + shape.head_parameters) * WIDTH[dtype]


def forward_bytes(shape: ModelShape, tokens: int, dtype: str) -> int:
    """A pass without gradients at its peak: one block's residual, norm, and MLP or attention."""
    inside = max(3 * shape.intermediate, 6 * shape.heads * shape.head_dim)
    return tokens * (3 * shape.hidden * FLOAT32 + inside * WIDTH[dtype])


# ---------------------------------------------------------------------------------- generation


def kv_bytes_per_token(shape: ModelShape, dtype: str) -> int:
    """Keys and values of one token in all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * WIDTH[dtype]


def hf_memory(job: JobConfig, shape: ModelShape, device: Device) -> Memory:
    """Engine hf: float32 weights, a cache of full width for the rows of a batch, all of whose prompts are read
    at once, and float64 sampling (scaled logits, log-softmax, exp and cumulative sum)."""
    prompt, response = job.data.max_prompt_length, job.data.max_response_length
    rows = min(job.rollout.max_num_seqs, job.data.train_batch_size * job.rollout.n)
    reading = forward_bytes(shape, rows * prompt, job.rollout.dtype) + rows * prompt * prompt * FLOAT32
    sampling = rows * shape.vocabulary * 4 * 8
    copies = 2 if device.shared else 1  # on a CPU the version that comes in lies in the same memory
    return Memory(
        weights=copies * FLOAT32 * shape.policy_parameters,
        activations=max(reading, sampling) + autocast_bytes(shape, job.rollout.dtype),
        kv_cache=rows * (prompt + response) * kv_bytes_per_token(shape, job.rollout.dtype),
    )


def vllm_memory(job: JobConfig, shape: ModelShape, device: Device) -> Memory:
    """Engine vllm on one of a replica's tensor_model_parallel_size devices: its share of the weights in
    rollout.dtype, and what gpu_memory_utilization leaves of the device as cache, on a CPU no more than
    max_num_seqs rows need; at least one sequence must fit."""
    rollout, width = job.rollout, job.data.max_prompt_length + job.data.max_response_length
    devices = rollout.tensor_model_parallel_size
    weights = shape.policy_parameters * WIDTH[rollout.dtype] // devices
    tokens = min(rollout.max_num_batched_tokens, rollout.max_num_seqs * width)
    logits = rollout.max_num_seqs * shape.vocabulary * FLOAT32 * 2
    activations = (forward_bytes(shape, tokens, rollout.dtype) + logits) // devices
    left = round(rollout.gpu_memory_utilization * device.memory_bytes) - weights - activations
    sequence = width * kv_bytes_per_token(shape, rollout.dtype) // devices
    if device.shared:
        left = min(left, rollout.max_num_seqs * sequence)
    return Memory(weights, 0, 0, activations, max(left, sequence))
