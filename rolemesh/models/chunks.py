"""Limits on the number of logits in memory at a time. Does not import torch, because the planner uses it."""

CHUNK_LOGITS = 2**25  # minimum when split; a chunk holds under twice this: 128 to 256 MiB of float32
MIN_MATRIX_ROWS = 256  # tokens in a forward pass; rolemesh/models/sequence.py says why


def tokens_at_once(vocabulary: int) -> int:
    """Return the minimum number of tokens in a chunk of logits; a chunk holds under twice as many."""
    return max(MIN_MATRIX_ROWS, CHUNK_LOGITS // vocabulary)
