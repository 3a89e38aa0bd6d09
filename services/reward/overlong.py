"""Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 13)."""

from __future__ import annotations

from torch import Tensor

from rolemesh.config.reward import OverlongBufferConfig


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: OverlongBufferConfig) -> Tensor:
    """0 up to the buffer, then falling in a straight line to -penalty_factor at the maximum.

    Args:
        lengths: [B] tokens of each response.
        max_tokens: of any response.
        buffer: how many of these it is that are punished, and how much.

    Returns:
        [B] float32, min(-(length - (max_tokens - len)) / len * penalty_factor, 0).
    """
    beyond = lengths.float() - (max_tokens - buffer.len)
    return (-beyond / buffer.len * buffer.penalty_factor).clamp(max=0)
