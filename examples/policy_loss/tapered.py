"""A policy loss: REINFORCE, tapered on wrong answers (TOPR, Le Roux et al. 2025, arXiv:2503.14286)."""

from __future__ import annotations

import torch
from torch import Tensor

from rolemesh.algos.policy_loss import TokenLosses, log_ratio
from rolemesh.plugins import Options, policy_loss


class TaperedOptions(Options):
    """Keys of actor.policy_loss.options in the job file."""

    most: float = 1.0  # largest weight of a token with a negative advantage


@policy_loss("tapered", options=TaperedOptions, meaning="a wrong answer counts less once it is unlikely")
def tapered_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, most: float
) -> TokenLosses:
    """Return the loss of each token; the actor takes their mean (actor.loss_agg_mode) and the gradient.

    -A log pi where A is positive; elsewhere -min(ratio, most) A log pi, and the weight has no gradient. So a
    wrong answer that the policy hardly gives any more is left alone, and not pushed down for ever.

    Args:
        log_probs: [b, T] of the policy under training, with gradient.
        old_log_probs: [b, T] of the policy before the update.
        advantages: [b, T], without gradient.
        response_mask: [b, T] bool; cells where it is False may hold anything.
        most: upper bound of the ratio.
    """
    ratio = log_ratio(log_probs, old_log_probs).detach().exp()
    wrong = advantages < 0
    weight = torch.where(wrong, ratio.clamp(max=most), 1.0)
    # Each share becomes a metric of the step: actor/tapered is the share of tokens with a weight below 1.
    shares = {"tapered": (weight < 1).float(), "ppo_kl": -log_ratio(log_probs, old_log_probs).detach()}
    return TokenLosses(-weight * advantages * log_probs, shares)
