"""Limits on the number of logits in memory at a time. Does not import torch, because the planner uses it."""

CHUNK_LOGITS = 2**25  # minimum when split; a chunk holds under twice this: 128 to 256 MiB of float32
MIN_MATRIX_ROWS = 256  # tokens in a forward pass; rolemesh/models/sequence.py says why
BLOCK_BYTES = 8  # of a logit on a GPU without gradients: float32, beside its log-softmax in float32
LEARNT_BYTES = 16  # of a logit on a GPU with gradients: the two, and a gradient of each
BLOCK_SHARE = 16  # a block takes at most this part of the GPU's memory: 1/16


def tokens_at_once(vocabulary: int) -> int:
    """Return the minimum number of tokens in a chunk of logits; a chunk holds under twice as many."""
    return max(MIN_MATRIX_ROWS, CHUNK_LOGITS // vocabulary)


def tokens_in_block(vocabulary: int, memory_bytes: int, logit_bytes: int = BLOCK_BYTES) -> int:
    """Return the maximum number of tokens whose logits a GPU computes at once.

    It depends on the GPU's whole memory, not on what is free, so that a job computes the same blocks whatever
    else is allocated. The limit on logits is a power of two: GPUs of one kind differ a little in their memory.

    Args:
        vocabulary: V.
        memory_bytes: of the GPU.
        logit_bytes: BLOCK_BYTES without gradients, LEARNT_BYTES with them.
    """
    logits = 1 << max(1, memory_bytes // (BLOCK_SHARE * logit_bytes)).bit_length() - 1
    return max(MIN_MATRIX_ROWS, logits // vocabulary)
