"""The engine's distribution against the trainer's: other kernels, another precision, or older weights drew the
tokens than those that learn from them.

d = old_log_probs − rollout_log_probs, both of the drawn token. w = exp(d) is its importance weight: what the
engine drew too often counts less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from rolemesh.algos.aggregation import masked_mean
from rolemesh.config.rollout_correction import Criterion


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


def bounded(weights: Tensor, low: float | None, high: float) -> Tensor:
    """min(w, high): a little bias for a variance that is bounded (Ionides 2008, "Truncated importance
    sampling"; Espeholt et al. 2018, arXiv:1802.01561, eq. 1). With `low`, w where it lies in [low, high], else
    0: IcePop (Ling Team 2025), which learns nothing from a token that the two see too differently.

    Args:
        low, high: RolloutCorrectionConfig.bounds.
    """
    if low is None:
        return weights.clamp(max=high)
    return torch.where((weights >= low) & (weights <= high), weights, 0)


# Of d (Schulman 2020, joschu.net/blog/kl-approx.html): estimates of KL(engine ‖ trainer).
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: torch.expm1(d) - d,  # expm1: between equal policies exp(d) − 1 would be rounding alone
}
# Of an estimate [b, T] that is 0 on masked cells: its statistic, [b, T] or [b, 1].
STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "seq_sum": lambda values, mask: values.sum(-1, keepdim=True),
    "seq_mean": lambda values, mask: values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1),
    "seq_max": lambda values, mask: values.amax(-1, keepdim=True),
}


def accepted_tokens(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, criteria: Iterable[Criterion]
) -> Tensor:
    """response_mask without what any criterion rejects: single tokens, or whole responses (Liu et al. 2025,
    "When Speed Kills Stability").

    k1 is −d, so its bounds are of the ratio rollout/old, the inverse of w.

    Args:
        old_log_probs, rollout_log_probs: [b, T].
        response_mask: [b, T] bool.
        criteria: RolloutCorrectionConfig.criteria.

    Returns:
        [b, T] bool.
    """
    d = torch.where(response_mask, old_log_probs - rollout_log_probs, 0).clamp(-20, 20)
    accepted = response_mask
    for each in criteria:
        statistic = STATISTICS[each.over](ESTIMATORS[each.estimator](d), response_mask)
        accepted = accepted & (statistic >= each.low) & (statistic <= each.high)
    return accepted


def rejection_metrics(accepted: Tensor, response_mask: Tensor) -> dict[str, float]:
    """The share of the sampled tokens that is rejected, and of the responses that lose some."""
    rejected = response_mask & ~accepted
    return {
        "rollout_corr/rollout_rs_masked_fraction": masked_mean(rejected.float(), response_mask).item(),
        "rollout_corr/rollout_rs_seq_masked_fraction": rejected.any(-1).float().mean().item(),
    }


def mismatch_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """How far the trainer's policy is from the engine's.

    kl is the mean of −d, k3_kl that of exp(d) − 1 − d, which is never negative and has less variance: nats per
    token drawn by the engine. A row's perplexity is exp(−mean log-probability): training_ppl and rollout_ppl
    are means over the rows, log_ppl_diff that of the difference of logarithms, ppl_ratio that of the ratio.
    χ²(trainer ‖ engine) = E[w²] − 1, w of a token (chi2_token) or of a response (chi2_seq).

    Args:
        as importance_weights.
    """
    mask = response_mask
    d = torch.where(mask, old_log_probs - rollout_log_probs, 0)
    near, near_row = d.clamp(-20, 20), d.sum(-1).clamp(-20, 20)
    rows, lengths = mask.any(-1), mask.sum(-1).clamp(min=1)
    trainer, engine = (-torch.where(mask, x, 0).sum(-1) / lengths for x in (old_log_probs, rollout_log_probs))
    means = {
        "kl": masked_mean(-d, mask),
        "k3_kl": masked_mean(ESTIMATORS["k3"](near), mask),
        "training_ppl": masked_mean(trainer.exp(), rows),
        "rollout_ppl": masked_mean(engine.exp(), rows),
        "log_ppl_diff": masked_mean(trainer - engine, rows),
        "ppl_ratio": masked_mean((trainer - engine).exp(), rows),
        "chi2_token": masked_mean(torch.expm1(2 * near), mask),
        "chi2_seq": masked_mean(torch.expm1(2 * near_row), rows),
    }
    return {f"rollout_corr/{name}": value.item() for name, value in means.items()}


def weight_metrics(weights: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Mean, least, greatest, deviation and effective sample size of w over the sampled tokens.

    The effective sample size is (Σw)²/(n·Σw²), the share of the n tokens that would tell as much if they were
    weighted alike (Kish 1965, "Survey Sampling"): 1 where all weights are equal, 1/n where one is all.

    Args:
        weights: [B, T], before they are bounded.
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
