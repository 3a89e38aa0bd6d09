"""The engine's distribution against the trainer's: other kernels, another precision, or older weights drew the
tokens than those that learn from them.

d = old_log_probs − rollout_log_probs, both of the drawn token. w = exp(d) is its importance weight: what the
engine drew too often counts less.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rolemesh.algos.aggregation import masked_mean


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: Literal["token", "sequence"],
) -> Tensor:
    """w = exp(d) of each token, or exp(Σ d) of the whole response on each of its tokens.

    The response's weight is unbiased, and its variance grows with the length. The token's stays small, and
    leaves out that the engine drew what stands before the token, too (Precup et al. 2000, "Eligibility traces
    for off-policy policy evaluation").

    Args:
        old_log_probs: [B, T], the actor's, before the update.
        rollout_log_probs: [B, T], the engine's.
        response_mask: [B, T] bool.
        level: algorithm.rollout_correction.rollout_is, token or sequence.

    Returns:
        [B, T], without gradient; 0 where response_mask is False.
    """
    d = torch.where(response_mask, old_log_probs - rollout_log_probs, 0).detach()
    if level == "sequence":
        d = d.sum(dim=1, keepdim=True)
    # exp() of one stale outlier would swamp the mean of the batch
    return torch.where(response_mask, d.clamp(-20, 20).exp(), 0)


def truncate(weights: Tensor, threshold: float) -> Tensor:
    """min(w, threshold): a little bias for a variance that is bounded (Ionides 2008, "Truncated importance
    sampling"; Espeholt et al. 2018, arXiv:1802.01561, eq. 1)."""
    return weights.clamp(max=threshold)


def mismatch_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """How far the trainer's policy is from the engine's, in nats per token drawn by the engine.

    kl is the mean of −d, k3_kl that of exp(d) − 1 − d, which is never negative and has less variance
    (Schulman 2020, joschu.net/blog/kl-approx.html). Both estimate KL(engine ‖ trainer).

    Args:
        as importance_weights.
    """
    d = torch.where(response_mask, old_log_probs - rollout_log_probs, 0)
    k3 = torch.expm1(d.clamp(-20, 20)) - d  # expm1: between equal policies exp(d) − 1 would be rounding alone
    return {
        "rollout_corr/kl": masked_mean(-d, response_mask).item(),
        "rollout_corr/k3_kl": masked_mean(k3, response_mask).item(),
    }


def weight_metrics(weights: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Mean, least, greatest, deviation and effective sample size of w over the sampled tokens.

    The effective sample size is (Σw)²/(n·Σw²), the share of the n tokens that would tell as much if they were
    weighted alike (Kish 1965, "Survey Sampling"): 1 where all weights are equal, 1/n where one is all.

    Args:
        weights: [B, T], before truncation.
        response_mask: [B, T] bool.
    """
    w = weights[response_mask].double()
    if not len(w):
        return {}
    return {
        "rollout_corr/rollout_is_mean": w.mean().item(),
        "rollout_corr/rollout_is_min": w.min().item(),
        "rollout_corr/rollout_is_max": w.max().item(),
        "rollout_corr/rollout_is_std": w.std(correction=0).item(),
        "rollout_corr/rollout_is_eff_sample_size": (w.sum().square() / (len(w) * w.square().sum())).item(),
    }
