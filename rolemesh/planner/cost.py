"""Estimates the seconds that a role needs for its part of a step.

The time of a pass is its matrix products at the device's FLOP/s, plus the bytes of all other operations at its
bandwidth, plus a constant for each block. Every response is assumed to have the maximum length. Shorter ones
take less time to generate, and less to train on without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.rollout import CHUNKS_PER_BATCH
from rolemesh.planner.activations import FLOAT32, WIDTH, block_bytes
from rolemesh.planner.collectives import Spread, exchange_seconds, gather_seconds, sum_seconds
from rolemesh.planner.device_specs import DIGEST_BANDWIDTH, PUBLISH_BANDWIDTH, RECEIVE_BANDWIDTH, Device
from rolemesh.planner.memory import Shapes, kv_bytes_per_token, published_width, tokens_of_pass, vllm_memory
from rolemesh.planner.shapes import ModelShape

# Bytes per parameter and optimizer step: AdamW reads four tensors and writes three, clipping reads the gradient
# twice and writes it once.
OPTIMIZER_TRAFFIC = 10 * FLOAT32
# A backward pass has two products for each product of the forward pass; checkpointing repeats the forward pass.
BACKWARD = 2
# Launches outside of the blocks, in units of a block: embedding, positions, mask and head; loss or sampling.
OUTSIDE = 2
# Rank 0's orders (benchmarks/ranks/): seconds of an order to one follower, more seconds for each further one,
# and the bytes of a row's columns per token on the wire.
ORDER_S = 1e-3
FOLLOWER_S = 5e-4
TOKEN_BYTES = 24

# A rollout's process receives faster from several holders than from one, by this factor. Its busiest thread
# took 0.61 s for a GiB from four holders, and 0.92 s from one (two cores).
STREAMS_GAIN = 1.5


@dataclass(frozen=True)
class ForwardPass:
    """One forward pass over `rows` rows of `width` tokens.

    Args:
        shape: the model's.
        rows: number of rows.
        width: tokens of a row.
        predicted: positions per row whose logits are computed; 0 for a value or reward model.
        dtype: of the matrix products.
    """

    shape: ModelShape
    rows: float
    width: int
    predicted: int
    dtype: str

    @property
    def flops(self) -> float:
        """Number of operations: 2 for each weight and token.

        Attention has 4 for each pair of tokens and each column of the heads; the masked half is computed too.
        """
        shape = self.shape
        pairs = 4 * self.width**2 * shape.heads * shape.head_dim * shape.layers
        head = 2 * shape.hidden * shape.vocabulary * self.predicted
        return self.rows * (2 * shape.multiplied_parameters * self.width + pairs + head)

    @property
    def traffic(self) -> float:
        """Bytes read and written.

        These are a write and a read of all that a backward pass would keep, and six passes over the float32
        logits (copy, maximum, sum, result, gather, entropy).
        """
        blocks = 2 * self.shape.layers * block_bytes(self.shape, 1, self.dtype) * self.width
        return self.rows * (blocks + 6 * self.predicted * self.shape.vocabulary * FLOAT32)

    def seconds(
        self,
        device: Device,
        micro_batch: float,
        passes: float = 1,
        together: int = 1,
        block_s: float | None = None,
    ) -> float:
        """Return the seconds for the work of `passes` forward passes, in micro-batches.

        Args:
            device: computes them.
            micro_batch: rows of a micro-batch.
            passes: number of passes.
            together: ranks that compute each micro-batch, each a part of its tokens.
            block_s: seconds of a block's launches in all passes; None: of one pass without gradients.
        """
        once = self.flops / device.flops[self.dtype] + self.traffic / device.memory_bandwidth
        calls = max(1.0, self.rows / micro_batch)
        launching = device.block_s if block_s is None else block_s
        return passes * once / together + calls * (self.shape.layers + OUTSIDE) * launching


def role_seconds(
    job: JobConfig, role: str, shapes: Shapes, device: Device, devices: int = 1, ranks: int | None = None
) -> dict[str, float]:
    """Return the seconds of one role on `devices` devices by phase ("generate", "score", "update").

    The result is empty for a role without a model. Rows are spread evenly.

    Args:
        job: the job.
        role: the role.
        shapes: by role.
        device: the kind of device.
        devices: number of them.
        ranks: of each replica; None: all devices if the role is trained, else 1.
    """
    if role not in shapes:
        return {}
    if role == "rollout":  # a replica's speed is assumed to grow linearly with its devices
        split = job.rollout.tensor_model_parallel_size
        rows = _rows(job, role) / devices * split
        return {"generate": generation_seconds(job, shapes[role], device, rows) / split}
    if ranks is None:
        ranks = devices if ROLES[role].trained else 1
    rows = _rows(job, role) * ranks / devices
    parts = role_parts(job, role, shapes[role], device, ranks, rows)
    return {phase: elapsed(of_phase, device) for phase, of_phase in parts.items()}


def elapsed(parts: Mapping[str, float], device: Device) -> float:
    """Return the seconds of a phase from its parts. GPUs gather weights and add gradients as they compute."""
    if device.shared:
        return sum(parts.values())
    behind = parts["gathers"] + parts["sums"]
    rest = sum(seconds for name, seconds in parts.items() if name not in ("compute", "gathers", "sums"))
    return max(parts["compute"], behind) + rest


def role_parts(
    job: JobConfig, role: str, shape: ModelShape, device: Device, ranks: int, rows: float
) -> dict[str, dict[str, float]]:
    """Return the seconds that a rank of a role, other than the rollout, spends by phase and part.

    Args:
        job: the job.
        role: the role.
        shape: of its model.
        device: of each rank; a shared one computes for all ranks.
        ranks: of the replica.
        rows: of a step that this replica computes.

    Returns:
        For "score", and for a trained role also "update": "compute"; "gathers" of weights; "sums" of gradients;
        "exchanges" of tokens for heads (Ulysses); "optimizer"; and "orders", with which rank 0 runs methods on
        the other ranks, and their rows.
    """
    job = job.with_dtypes(device.kind)
    spec = ROLES[role]
    spread = Spread.of(job, role, ranks)
    width = job.data.max_prompt_length + job.data.max_response_length
    predicted = 0 if spec.scores else job.data.max_response_length + 1
    model = job.model_of(role)
    parameters = shape.parameters(scores=spec.scores)
    share = rows / spread.streams
    micro = tokens_of_pass(job, role) / width
    calls = max(1.0, share / micro)
    one = ForwardPass(
        shape, share * (ranks / spread.together if device.shared else 1), width, predicted, model.dtype
    )
    together = 1 if device.shared else spread.together

    in_blocks = min(parameters, shape.block_parameters)
    block = in_blocks / shape.layers
    outside = parameters - in_blocks
    gathers = calls * (
        shape.layers * gather_seconds(device, WIDTH[model.dtype] * block, spread.shards)
        + gather_seconds(device, FLOAT32 * outside, spread.shards)
    )
    heads = shape.heads * shape.head_dim * WIDTH[model.dtype]  # of each of q, k, v and the output
    tokens = micro * width / spread.together
    exchanges = calls * shape.layers * 4 * exchange_seconds(device, tokens * heads, spread.together)
    sent = rows * width * TOKEN_BYTES * spread.together * (ranks - 1) / ranks / device.wire_bandwidth
    order = ORDER_S + FOLLOWER_S * (ranks - 2) if ranks > 1 else 0.0
    scoring = {
        "compute": one.seconds(device, micro, together=together),
        "gathers": gathers,
        "sums": 0.0,
        "exchanges": exchanges,
        "orders": CHUNKS_PER_BATCH * order + sent,
    }
    if role == "actor" and job.ref_in_actor:
        scoring = {name: 2 * seconds for name, seconds in scoring.items()}  # a second pass with the adapter off
    if not spec.trained:
        return {"score": scoring}
    if not job.generates:  # nothing is scored: the responses are given
        scoring = dict.fromkeys(scoring, 0.0)

    section = job.actor if role == "actor" else job.critic
    learnt = shape.trained_parameters(job.actor.model) if role == "actor" else parameters
    backward = BACKWARD if learnt >= parameters else 1  # fixed matrices have no gradients of their own
    repeats = section.model.enable_gradient_checkpointing
    passes = 1 + backward + repeats
    block_s = device.trained_block_s + repeats * device.block_s
    steps = job.data.train_batch_size // job.mini_batch_size(role)
    epochs = section.ppo_epochs
    assert epochs is not None, "JobConfig fills it in"
    # Each rank makes a pass in every mini-batch, even for a few rows.
    in_mini = min(micro, share / steps)
    repeated = steps * max(1.0, share / steps / micro) / calls
    of_block = shape.layers * gather_seconds(device, FLOAT32 * learnt / shape.layers, spread.shards)
    copies = sum_seconds(device, FLOAT32 * learnt / spread.shards, spread.copies)
    adamw = OPTIMIZER_TRAFFIC * learnt / spread.shards / device.memory_bandwidth
    if spread.is_offloaded and not device.shared:
        adamw = OPTIMIZER_TRAFFIC * learnt / spread.shards / device.host_bandwidth
    elif spread.fetches_moments:
        adamw += 2 * 2 * FLOAT32 * learnt / spread.shards / device.host_bandwidth
    update = {
        "compute": one.seconds(device, in_mini, passes, together, block_s),
        "gathers": (1 + spread.is_gathered_twice) * repeated * gathers,
        "sums": repeated * calls * (of_block + copies),
        "exchanges": passes * repeated * exchanges,
        "optimizer": steps * adamw * (ranks if device.shared else 1),
        "orders": steps * order + sent,
    }
    return {"score": scoring, "update": {name: epochs * seconds for name, seconds in update.items()}}


def _rows(job: JobConfig, role: str) -> int:
    """Return the number of a step's rows for a role, ReMax's greedy ones included."""
    greedy = job.page.answers_greedily and role in ("rollout", "reward")  # one more answer to each prompt
    return job.data.train_batch_size * (job.rollout.n + greedy)


def generation_seconds(job: JobConfig, shape: ModelShape, device: Device, rows: float) -> float:
    """Return the seconds to read the prompts and generate T tokens, with at most max_num_seqs rows at once.

    Each token reads all weights and the cache, which dominates if there are few rows.
    """
    job = job.with_dtypes(device.kind)
    prompt = job.data.max_prompt_length
    response = job.data.max_response_length
    vllm = job.engine.reserves_memory
    dtype = job.rollout.dtype
    together = min(rows, job.rollout.rows)
    if vllm:  # limited by the size of the cache
        sequence = (
            (prompt + response) * kv_bytes_per_token(shape, dtype) / job.rollout.tensor_model_parallel_size
        )
        together = min(together, vllm_memory(job, shape, device).kv_cache / sequence)
    batches = rows / together
    reading = ForwardPass(shape, together, prompt, 1, dtype).seconds(device, max(1, round(together)))

    head = shape.hidden * shape.vocabulary
    read = (shape.multiplied_parameters + head) * WIDTH[dtype]
    if dtype != "float32" and not vllm:  # float32 weights are cast for every token
        read += (shape.multiplied_parameters + head) * (FLOAT32 + WIDTH[dtype])
    width = prompt + response / 2  # on average
    cache = together * width * kv_bytes_per_token(shape, dtype)
    sampling = together * shape.vocabulary * (4 * FLOAT32 if vllm else 8 * 8)
    flops = 2 * (shape.multiplied_parameters + head) + 4 * width * shape.heads * shape.head_dim * shape.layers
    passed = 2 * together * shape.layers * block_bytes(shape, 1, dtype)
    # vLLM's CUDA graphs launch all operations of a token at once.
    launching = 0.0 if vllm and not device.shared else (shape.layers + OUTSIDE) * device.block_s
    token = (
        max(together * flops / device.flops[dtype], read / device.memory_bandwidth)
        + (cache + sampling + passed) / device.memory_bandwidth
        + launching
    )
    return batches * (reading + response * token)


def handover_seconds(job: JobConfig, shapes: Shapes, device: Device, ranks: int, *, together: bool) -> float:
    """Return the seconds to bring the actor's weights to the rollouts.

    They are copied from the actor's devices to shared memory, in the dtype of the rollout's engine. There they
    are checked, and then copied to the engine's devices. On a CPU they are copied twice in memory. A machine
    first gets the rows of its part that its ranks lack, unless they have a copy of the model (HSDP). If actor
    and rollout share a group, each machine gets all. Otherwise the machines send their parts at the same time
    to a rollout, which relays them to the others.

    Args:
        job: the job.
        shapes: by role.
        device: the kind of device.
        ranks: of the actor.
        together: True if actor and rollout share a group.
    """
    num_bytes = published_width(job.with_dtypes(device.kind)) * shapes["actor"].policy_parameters
    machines = -(-ranks // device.per_node)
    writing = 1 if together else machines  # each its part
    elsewhere = 0 if Spread.of(job, "actor", ranks).shards <= device.per_node else 1 - 1 / machines
    of_byte = 1 / PUBLISH_BANDWIDTH / writing + 1 / DIGEST_BANDWIDTH + 1 / RECEIVE_BANDWIDTH
    copied = num_bytes * (2 / device.memory_bandwidth if device.shared else of_byte)
    sent = num_bytes / device.wire_bandwidth
    if together:
        return copied + elsewhere * sent
    received = sent if machines == 1 else max(sent / machines, sent / STREAMS_GAIN)
    return copied + elsewhere * sent / machines + received
