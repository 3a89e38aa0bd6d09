"""From per-token numbers to one: masked means, whitening, and the loss of a mini-batch made in pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rolemesh.errors import InvalidConfig


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the cells where mask is True. What stands in the others does not matter, NaN included."""
    return torch.where(mask, values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the cells where mask is True; 0 where it is True nowhere."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values − mean)·rsqrt(variance + 1e-8), mean and variance (Bessel's) over the cells where mask is True.

    The other cells are moved and scaled alike, not zeroed. A single cell has variance 0 and comes out as 0.
    """
    centred = values - masked_mean(values, mask)
    variance = masked_sum(centred.square(), mask) / (mask.sum() - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + 1e-8)


class TokenMean(NamedTuple):
    """A mean over tokens of a mini-batch that is computed in micro-batches: totals and numbers add up.

    A loss may reject tokens by the policy under training, so their number is known only after the last
    micro-batch.
    """

    total: Tensor
    num_tokens: Tensor

    @classmethod
    def over(cls, values: Tensor, mask: Tensor) -> TokenMean:
        """A micro-batch's part: of values [b, T], the cells where mask [b, T] is True."""
        return cls(masked_sum(values, mask).detach(), mask.sum())


@dataclass(frozen=True)
class Aggregation:
    """How the per-token losses of one mini-batch become its loss.

    A mini-batch is computed in micro-batches (later: by several ranks). Its denominators belong to the
    mini-batch as a whole, so they are taken from the whole mini-batch's mask, once; `aggregation(losses,
    mask)` of a micro-batch is that micro-batch's share, and the shares add up to the same loss and gradient
    however the rows were cut.

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
    def of(cls, mask: Tensor, mode: str = "token-mean", scale_factor: float | None = None) -> Aggregation:
        """For the mini-batch with this response_mask [B, T].

        Args:
            scale_factor: actor.loss_scale_factor; None: T.

        Raises:
            InvalidConfig: no such mode.
        """
        if mode not in MODES:
            raise InvalidConfig(f"loss_agg_mode is one of {list(MODES)}, not {mode!r}")
        rows, width = mask.shape
        return cls(mode, max(1.0, float(mask.sum())), max(1.0, float(rows)), float(scale_factor or width))

    def __call__(self, losses: Tensor, mask: Tensor) -> Tensor:
        """A micro-batch's share of the loss.

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
