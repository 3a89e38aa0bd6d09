"""How many logits exist at a time. The planner reads it without torch."""

CHUNK_LOGITS = 2**25  # as many, and less than twice as many: 128 to 256 MiB of float32
MIN_MATRIX_ROWS = 256  # tokens in a forward pass; rolemesh/models/sequence.py says why


def tokens_at_once(vocabulary: int) -> int:
    """Tokens whose logits are computed together, or up to twice as many."""
    return max(MIN_MATRIX_ROWS, CHUNK_LOGITS // vocabulary)
