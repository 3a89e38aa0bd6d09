"""Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13)."""

from __future__ import annotations

from torch import Tensor

from rolemesh.config.reward import OverlongBufferConfig


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: OverlongBufferConfig) -> Tensor:
    """Compute the penalty: 0 up to the buffer, then linear down to -penalty_factor at the maximum length.

    Args:
        lengths: [B], tokens of each response.
        max_tokens: maximum length of a response.
        buffer: `len`, the last tokens before the maximum that are penalized, and penalty_factor.

    Returns:
        [B] float32, min(-(length - (max_tokens - len)) / len * penalty_factor, 0).
    """
    beyond = lengths.float() - (max_tokens - buffer.len)
    return (-beyond / buffer.len * buffer.penalty_factor).clamp(max=0)
