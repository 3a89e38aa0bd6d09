"""Reductions of per-token numbers: masked means, whitening, and a mini-batch's loss from micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rolemesh.errors import InvalidConfig


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the cells where mask is True. Other cells are ignored, even if they hold NaN."""
    return torch.where(mask, values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the cells where mask is True; 0 if there are none."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return (values − mean)·rsqrt(variance + 1e-8), with mean and variance over the cells where mask is True.

    The variance has Bessel's correction. Other cells are shifted and scaled by the same numbers, not zeroed. A
    single cell has variance 0 and becomes 0.
    """
    centred = values - masked_mean(values, mask)
    variance = masked_sum(centred.square(), mask) / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


class TokenMean(NamedTuple):
    """A micro-batch's part of a mean over the tokens of its mini-batch: totals and counts are summed.

    A loss may reject tokens by the policy under training. The number of accepted tokens is therefore known only
    after the last micro-batch.
    """

    total: Tensor
    num_tokens: Tensor

    @classmethod
    def over(cls, values: Tensor, mask: Tensor) -> TokenMean:
        """Make a micro-batch's part from the cells of values [b, T] where mask [b, T] is True."""
        return cls(masked_sum(values, mask).detach(), mask.sum())


class BatchCounts(NamedTuple):
    """The numbers of a mini-batch that the denominators of its loss come from.

    Args:
        num_tokens: sampled tokens.
        num_sequences: rows. A row without a sampled token counts.
        width: T, response tokens of the widest possible row.
    """

    num_tokens: int
    num_sequences: int
    width: int

    @classmethod
    def of(cls, mask: Tensor) -> BatchCounts:
        """Count the mini-batch with this response_mask [B, T]."""
        return cls(int(mask.sum()), *mask.shape)


@dataclass(frozen=True)
class Aggregation:
    """Reduces the per-token losses of one mini-batch to its loss, one micro-batch at a time.

    The denominators come from the whole mini-batch. Calling `aggregation(losses, mask)` gives a micro-batch's
    share of the loss. The shares sum to the same loss and gradient however the rows are split, over
    micro-batches and over ranks.

    Args:
        mode: actor.loss_agg_mode.
        num_tokens: sampled tokens in the mini-batch, at least 1.
        num_sequences: rows in the mini-batch, at least 1. A row without a sampled token counts.
        scale: the divisor of seq-mean-token-sum-norm.
    """

    mode: str
    num_tokens: float
    num_sequences: float
    scale: float

    @classmethod
    def of(
        cls, mini_batch: BatchCounts, mode: str = "token-mean", scale_factor: float | None = None
    ) -> Aggregation:
        """Make the aggregation of a mini-batch.

        Args:
            mini_batch: its counts.
            mode: actor.loss_agg_mode.
            scale_factor: actor.loss_scale_factor; None: T.

        Raises:
            InvalidConfig: the mode does not exist.
        """
        if mode not in MODES:
            raise InvalidConfig(f"expected a loss_agg_mode of {list(MODES)}; got {mode!r}")
        num_tokens, num_sequences, width = mini_batch
        scale = float(scale_factor or width)
        return cls(mode, max(1.0, float(num_tokens)), max(1.0, float(num_sequences)), scale)

    def __call__(self, losses: Tensor, mask: Tensor) -> Tensor:
        """Compute a micro-batch's share of the loss.

        Args:
            losses: [b, T] per token.
            mask: [b, T] bool.
        """
        return MODES[self.mode](self, torch.where(mask, losses, 0), mask)


MODES: dict[str, Callable[[Aggregation, Tensor, Tensor], Tensor]] = {
    "token-mean": lambda whole, losses, mask: losses.sum() / whole.num_tokens,
    "token-sum": lambda whole, losses, mask: losses.sum(),
    "seq-mean-token-sum": lambda whole, losses, mask: losses.sum() / whole.num_sequences,
    "seq-mean-token-mean": lambda whole, losses, mask: (
        (losses.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / whole.num_sequences
    ),
    "seq-mean-token-sum-norm": lambda whole, losses, mask: losses.sum() / whole.num_sequences / whole.scale,
}
