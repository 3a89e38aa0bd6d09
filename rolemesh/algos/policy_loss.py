"""Policy losses, per token. `POLICY_LOSSES` maps actor.policy_loss.loss_mode to the function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """How far the ratio of new to old probability may count.

    Args:
        low, high: the ratio is held in [1 − low, 1 + high].
        dual: where A < 0, a token's loss is at most −dual·A.
    """

    low: float
    high: float
    dual: float


@dataclass(frozen=True)
class TokenLosses:
    """What a policy loss gives.

    Args:
        losses: [B, T], to be aggregated; masked cells hold anything.
        shares: name under actor/ to a [B, T] tensor without gradient, whose mean over the sampled tokens is
            reported.
    """

    losses: Tensor
    shares: dict[str, Tensor] = field(default_factory=dict)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log ρ, in ±20: exp() of one stale outlier would swamp the mean of the batch."""
    return (log_probs - old_log_probs).clamp(-20, 20)


def vanilla_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, clip: Clip
) -> TokenLosses:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), with the dual clip (Ye et al.
    2019, arXiv:1912.09729, eq. 5).

    max(−ρA, −clip(ρ, 1 − low, 1 + high)·A); where A < 0 at most −dual·A, so that one token which the new
    policy finds far likelier cannot take over the step.

    Args:
        log_probs: [B, T], of the policy under training, with gradient.
        old_log_probs: [B, T], before the update.
        advantages: [B, T].
        response_mask: [B, T] bool; not used here, the loss of a token depends on that token alone.
        clip: the ranges.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    free = -ratio * advantages
    clipped = -ratio.clamp(1 - clip.low, 1 + clip.high) * advantages
    single = torch.maximum(free, clipped)
    bound = -clip.dual * advantages
    negative = advantages < 0
    with torch.no_grad():
        shares = {
            "ppo_kl": -log_ratio(log_probs, old_log_probs),
            "pg_clipfrac": (clipped > free).to(single.dtype),
            "pg_clipfrac_lower": ((single > bound) & negative).to(single.dtype),
        }
    return TokenLosses(torch.where(negative, torch.minimum(single, bound), single), shares)


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], TokenLosses]
POLICY_LOSSES: dict[str, PolicyLoss] = {"vanilla": vanilla_policy_loss}
