"""Seconds that a role needs for its part of a step.

A pass is matrix products at the device's FLOP/s, plus the bytes that the rest reads and writes at its
bandwidth, plus a constant for each block. Every response is taken to use its whole length: of shorter ones the
generation takes less, and what is trained too where padding is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolemesh.config import JobConfig
from rolemesh.planner.devices import Device
from rolemesh.planner.memory import (
    FLOAT32,
    WIDTH,
    Shapes,
    block_bytes,
    kv_bytes_per_token,
    tokens_of_pass,
    vllm_memory,
)
from rolemesh.planner.shapes import ModelShape

# Bytes per parameter and optimizer step: AdamW reads four tensors and writes three, clipping reads the gradient
# twice and writes it once.
OPTIMIZER_TRAFFIC = 10 * FLOAT32
# A backward pass multiplies twice for each product of the forward pass; checkpointing makes that pass again.
BACKWARD = 2
# Launches besides the blocks', in blocks: embedding, positions, mask and head; loss or sampling.
OUTSIDE = 2


@dataclass(frozen=True)
class Pass:
    """One forward pass over `rows` rows of `width` tokens.

    Args:
        predicted: positions per row whose logits are computed; 0 of a value or reward model.
    """

    shape: ModelShape
    rows: float
    width: int
    predicted: int
    dtype: str

    @property
    def flops(self) -> float:
        """2 for each weight and token; in attention 4 for each pair of tokens and each of the heads' columns
        (the masked half is computed as well)."""
        shape = self.shape
        pairs = 4 * self.width**2 * shape.heads * shape.head_dim * shape.layers
        head = 2 * shape.hidden * shape.vocabulary * self.predicted
        return self.rows * (2 * shape.multiplied_parameters * self.width + pairs + head)

    @property
    def traffic(self) -> float:
        """Bytes: what a backward pass would keep is written and read, the float32 logits are passed over six
        times (copy, maximum, sum, result, gather, entropy)."""
        blocks = 2 * self.shape.layers * block_bytes(self.shape, 1, self.dtype) * self.width
        return self.rows * (blocks + 6 * self.predicted * self.shape.vocabulary * FLOAT32)

    def seconds(self, device: Device, micro_batch: float, passes: float = 1) -> float:
        """`passes` forward passes' worth of work, in micro-batches."""
        once = self.flops / device.flops[self.dtype] + self.traffic / device.memory_bandwidth
        calls = max(1.0, self.rows / micro_batch)
        return passes * (once + calls * (self.shape.layers + OUTSIDE) * device.block_s)


def role_seconds(
    job: JobConfig, role: str, shapes: Shapes, device: Device, devices: int = 1
) -> dict[str, float]:
    """Seconds by phase ("generate", "judge", "update") of one role on `devices` devices; without a model none.

    Rows are spread evenly. A trained role of several ranks gathers its weights for each forward and backward
    pass and scatters its gradients while it computes: the longer of the two counts.
    """
    if role not in shapes:
        return {}
    shape, data = shapes[role], job.data
    greedy = job.algorithm.adv_estimator == "remax" and role in ("rollout", "reward")  # one more to each prompt
    rows = data.train_batch_size * (job.rollout.n + greedy) / devices
    width = data.max_prompt_length + data.max_response_length
    predicted = data.max_response_length + 1
    if role == "rollout":  # a replica of several devices is taken to be as many times as fast
        split = job.rollout.tensor_model_parallel_size
        return {"generate": generation_seconds(job, shape, device, rows * split) / split}
    if role == "reference":
        one = Pass(shape, rows, width, predicted, job.reference_model.dtype)
        return {"judge": one.seconds(device, tokens_of_pass(job, role) / width)}
    if role == "reward":
        config = job.reward.reward_model
        one = Pass(shape, rows, width, 0, config.model.dtype)
        return {"judge": one.seconds(device, tokens_of_pass(job, role) / width)}
    if role == "actor":
        one = Pass(shape, rows, width, predicted, job.actor.model.dtype)
        epochs = job.actor.ppo_epochs
        recomputes = job.actor.model.enable_gradient_checkpointing
        mini, learnt = job.actor.ppo_mini_batch_size, shape.trained_parameters(job.actor.model)
        parameters = shape.policy_parameters
    else:
        one = Pass(shape, rows, width, 0, job.critic_model.dtype)
        assert job.critic.ppo_epochs is not None, "JobConfig fills it in"
        epochs = job.critic.ppo_epochs
        recomputes = job.critic_model.enable_gradient_checkpointing
        mini, parameters = job.critic_mini_batch_size, shape.score_parameters
        learnt = parameters

    gathering = FLOAT32 * parameters * (devices - 1) / devices / device.link_bandwidth
    micro = tokens_of_pass(job, role) / width
    calls = max(1.0, rows / micro)
    judge = max(one.seconds(device, micro), calls * gathering)
    backward = BACKWARD if learnt >= parameters else 1  # fixed matrices have no gradients of their own
    passes = 1 + backward + recomputes
    if role == "actor" and job.ref_in_actor:
        judge *= 2  # once more with the adapter off
    learn = max(one.seconds(device, micro, passes), 3 * calls * gathering)
    steps = data.train_batch_size // mini
    adamw = steps * OPTIMIZER_TRAFFIC * learnt / devices / device.memory_bandwidth
    return {"judge": judge, "update": epochs * (learn + adamw)}


def generation_seconds(job: JobConfig, shape: ModelShape, device: Device, rows: float) -> float:
    """Prompts are read, then T tokens made one after another, of at most max_num_seqs rows at once. A token
    reads all weights and the cache: of few rows that is what takes the time."""
    prompt, response = job.data.max_prompt_length, job.data.max_response_length
    vllm, dtype = job.rollout.name == "vllm", job.rollout.dtype
    together = min(rows, job.rollout.max_num_seqs)
    if vllm:  # no more than the cache has room for
        sequence = (
            (prompt + response) * kv_bytes_per_token(shape, dtype) / job.rollout.tensor_model_parallel_size
        )
        together = min(together, vllm_memory(job, shape, device).kv_cache / sequence)
    batches = rows / together
    reading = Pass(shape, together, prompt, 1, dtype).seconds(device, max(1, round(together)))

    head = shape.hidden * shape.vocabulary
    read = (shape.multiplied_parameters + head) * WIDTH[dtype]
    if dtype != "float32" and not vllm:  # float32 weights are cast for every token
        read += (shape.multiplied_parameters + head) * (FLOAT32 + WIDTH[dtype])
    width = prompt + response / 2  # on average
    cache = together * width * kv_bytes_per_token(shape, dtype)
    sampling = together * shape.vocabulary * (4 * FLOAT32 if vllm else 8 * 8)
    flops = 2 * (shape.multiplied_parameters + head) + 4 * width * shape.heads * shape.head_dim * shape.layers
    passed = 2 * together * shape.layers * block_bytes(shape, 1, dtype)
    # vLLM's CUDA graphs launch a whole token at once.
    launching = 0.0 if vllm and not device.shared else (shape.layers + OUTSIDE) * device.block_s
    token = (
        max(together * flops / device.flops[dtype], read / device.memory_bandwidth)
        + (cache + sampling + passed) / device.memory_bandwidth
        + launching
    )
    return batches * (reading + response * token)


def handover_seconds(job: JobConfig, shapes: Shapes, device: Device, *, together: bool) -> float:
    """The actor's float32 weights to the rollouts: through memory where they share a group, else over the wire
    once, however many rollouts there are, since they relay."""
    num_bytes = FLOAT32 * shapes["actor"].policy_parameters
    copied = 2 * num_bytes / device.memory_bandwidth
    return copied if together else copied + num_bytes / device.wire_bandwidth
