"""Estimates the bytes of a pass through a model: activations, autocast's copies and gathered weights."""

from __future__ import annotations

from rolemesh.config.model import TrainedModelConfig
from rolemesh.planner.collectives import Spread
from rolemesh.planner.shapes import ModelShape

FLOAT32 = 4
WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes
# Blocks whose inputs are on the GPU at once with enable_activation_offload: one is used, one is copied.
OFFLOADED_INPUTS = 2


def passing_bytes(
    shape: ModelShape,
    model: TrainedModelConfig,
    tokens: int,
    head_bytes: int,
    casts: tuple[int, int],
    *,
    shared: bool,
) -> int:
    """Return the peak bytes of activations in a forward and backward pass.

    The blocks' activations are kept for their backward pass, with autocast's copies of the matrices; with
    checkpointing only the blocks' inputs are kept. On a GPU these come on top, one after another:

    - with checkpointing: one block's forward pass, and copies of all matrices;
    - the head's logits, with their gradients;
    - gradients of one block's activations; with checkpointing also the block, recomputed, with its copies.

    On a CPU they are added up, because its allocator reuses little freed memory.

    Args:
        shape: the model's.
        model: its section.
        tokens: of the micro-batch.
        head_bytes: of the logits.
        casts: bytes of autocast's copies of the blocks' matrices, and of the head's (cast_parts).
        shared: True on a CPU.
    """
    blocks, head = casts
    block = block_bytes(shape, tokens, model.dtype)
    inputs = FLOAT32 * shape.hidden * tokens
    checkpoints = model.enable_gradient_checkpointing
    if shared:
        stored = inputs * shape.layers + block if checkpoints else block * shape.layers
        return stored + block + head_bytes + blocks + head
    last = last_bytes(shape, tokens, model.dtype)
    if not checkpoints:
        return block * shape.layers + last + blocks + head + max(head_bytes, block)
    kept = min(shape.layers, OFFLOADED_INPUTS) if model.enable_activation_offload else shape.layers
    forward = forward_bytes(shape, tokens, model.dtype) + blocks
    return kept * inputs + last + head + max(forward, head_bytes, 2 * block + blocks // shape.layers)


def block_bytes(shape: ModelShape, tokens: int, dtype: str) -> int:
    """Return the bytes that a block keeps for its backward pass.

    They are counted from the operations of a Llama block under autograd. Both norms keep their input and the
    normalised input in float32, and the products after them keep the norms' output. Attention keeps q, k, v (of
    all heads, since grouped ones are repeated) and its output. It does not keep the scores, since the kernel is
    fused. The MLP keeps gate, its activation, up and their product.
    """
    small = WIDTH[dtype]
    norms = 2 * shape.hidden * (2 * FLOAT32 + small)
    attention = 4 * shape.heads * shape.head_dim * small
    mlp = 4 * shape.intermediate * small
    return tokens * (norms + attention + mlp)


def forward_bytes(shape: ModelShape, tokens: int, dtype: str) -> int:
    """Return the peak bytes of a pass without gradients: one block's residual, norm, and MLP or attention."""
    inside = max(3 * shape.intermediate, 6 * shape.heads * shape.head_dim)
    return tokens * (3 * shape.hidden * FLOAT32 + inside * WIDTH[dtype])


def last_bytes(shape: ModelShape, tokens: int, dtype: str) -> int:
    """Return the bytes of the last norm: its input, plain and normalised, in float32; and the head's input."""
    return tokens * shape.hidden * (2 * FLOAT32 + WIDTH[dtype])


def cast_bytes(shape: ModelShape, dtype: str, spread: Spread) -> int:
    """Return the bytes of autocast's copies of the matrices; none in float32."""
    return sum(cast_parts(shape, dtype, spread))


def cast_parts(shape: ModelShape, dtype: str, spread: Spread) -> tuple[int, int]:
    """Return the bytes of autocast's copies of the blocks' matrices, and of the head's.

    Sharded blocks are gathered in this type, and only the head's matrix is copied, also if it is tied.
    """
    if dtype == "float32":
        return 0, 0
    blocks = 0 if spread.shards > 1 else shape.multiplied_parameters
    return blocks * WIDTH[dtype], shape.hidden * shape.vocabulary * WIDTH[dtype]


def gathered_bytes(parameters: int, shape: ModelShape, dtype: str) -> int:
    """Return the bytes of the weights that FSDP has gathered at once.

    These are two blocks in the type of matrix products, and everything outside of blocks in float32.
    """
    in_blocks = min(parameters, shape.block_parameters)
    return WIDTH[dtype] * 2 * in_blocks // shape.layers + FLOAT32 * (parameters - in_blocks)


def peak_with_gathered_bytes(passing: int, learnt: int, parameters: int, shape: ModelShape, dtype: str) -> int:
    """Return the peak bytes of activations, gathered weights and gathered gradients of a backward pass.

    In the middle of the pass these are one block's gradients, and their float32 copies that are being added up
    over the ranks. At its end they are the same for everything outside of blocks, without activations. A model
    with an adapter has gathered gradients only of the adapter, which are small.
    """
    in_blocks = min(parameters, shape.block_parameters)
    outside = FLOAT32 * (parameters - in_blocks)
    learns_all = learnt >= parameters
    block = learns_all * in_blocks // shape.layers
    middle = passing + gathered_bytes(parameters, shape, dtype) + (WIDTH[dtype] + 2 * FLOAT32) * block
    return max(middle, outside * (1 + 2 * learns_all))
