"""The engine's distribution against the trainer's: other kernels, another precision, or older weights drew the
tokens than those that learn from them.

d = old_log_probs − rollout_log_probs, both of the drawn token. w = exp(d) is its importance weight: what the
engine drew too often counts less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rolemesh.algos.aggregation import masked_mean
from rolemesh.config.rollout_correction import Criterion, RolloutCorrectionConfig


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


def normalised(
    weights: Tensor, response_mask: Tensor, *, level: Literal["token", "sequence"]
) -> tuple[Tensor, float]:
    """Weights over their mean, so that the correction does not change the size of the step.

    Args:
        weights: [B, T], bounded, of the whole batch.
        level: the mean is over tokens, or over responses, which have one weight each.

    Returns:
        the weights; and their mean before, or 1 where it is 0 (IcePop may leave nothing) and they stay.
    """
    if level == "sequence":
        mean = masked_mean(weights.amax(-1), response_mask.any(-1)).item()
    else:
        mean = masked_mean(weights, response_mask).item()
    factor = mean if mean > 1e-8 else 1.0
    return weights / factor, factor


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
    accepted = response_mask
    for each in criteria:
        statistic = _statistic(each, old_log_probs, rollout_log_probs, response_mask)
        accepted = accepted & (statistic >= each.low) & (statistic <= each.high)
    return accepted


def _statistic(
    criterion: Criterion, old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> Tensor:
    """What the criterion bounds, [b, T] or [b, 1]."""
    d = torch.where(response_mask, old_log_probs - rollout_log_probs, 0).clamp(-20, 20)
    return STATISTICS[criterion.over](ESTIMATORS[criterion.estimator](d), response_mask)


# What `spread` tells, to its metric: of the bounded weights, and of those before.
SPREAD_NAMES = {
    "mean": ("rollout_is_mean", "rollout_is_raw_mean"),
    "min": ("rollout_is_min", "rollout_is_raw_min"),
    "max": ("rollout_is_max", "rollout_is_raw_max"),
    "std": ("rollout_is_std", "rollout_is_raw_std"),
    "eff_sample_size": ("rollout_is_eff_sample_size", "rollout_is_raw_eff_sample_size"),
}


@dataclass(frozen=True)
class Correction:
    """What algorithm.rollout_correction makes of a batch.

    Args:
        weights: [B, T], what the policy loss is multiplied by; None without rollout_is.
        accepted: [B, T] bool, the tokens of the loss; None without rollout_rs.
        metrics: under their names, each explained in docs/metrics.md.
    """

    weights: Tensor | None
    accepted: Tensor | None
    metrics: dict[str, float]


def correct(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Weights, mask and metrics of a batch.

    Args:
        as importance_weights; config: the job's.
    """
    log_probs = (old_log_probs, rollout_log_probs, response_mask)
    raw = importance_weights(*log_probs, level=config.rollout_is or "token")
    metrics = mismatch_metrics(*log_probs)
    metrics |= {SPREAD_NAMES[name][1]: value for name, value in spread(raw, response_mask).items()}
    weights = accepted = None
    if config.rollout_is:
        weights = bounded(raw, *config.bounds)
        metrics |= weight_metrics(weights, raw, response_mask, config)
        if config.rollout_is_batch_normalize:
            weights, factor = normalised(weights, response_mask, level=config.rollout_is)
            metrics["rollout_is_batch_norm_factor"] = factor
    if config.criteria:
        accepted = accepted_tokens(*log_probs, config.criteria)
        metrics |= rejection_metrics(accepted, response_mask)
        for each in config.criteria:
            statistic = _statistic(each, *log_probs).expand_as(response_mask)
            metrics[f"rollout_rs_{each.name}_mean"] = masked_mean(statistic, response_mask).item()
    return Correction(weights, accepted, {f"rollout_corr/{name}": value for name, value in metrics.items()})


def rejection_metrics(accepted: Tensor, response_mask: Tensor) -> dict[str, float]:
    """The share of the sampled tokens that is rejected, and of the responses that lose some."""
    rejected = response_mask & ~accepted
    return {
        "rollout_rs_masked_fraction": masked_mean(rejected.float(), response_mask).item(),
        "rollout_rs_seq_masked_fraction": rejected.any(-1).float().mean().item(),
    }


def mismatch_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """How far the trainer's policy is from the engine's.

    kl is the mean of −d, k3_kl that of exp(d) − 1 − d, which is never negative and has less variance: nats per
    token drawn by the engine. A row's perplexity is exp(−mean log-probability): training_ppl and rollout_ppl
    are means over the rows, training_log_ppl and rollout_log_ppl those of its logarithm. log_ppl_diff is the
    trainer's logarithm less the engine's: mean, mean size, greatest and least over the rows; ppl_ratio is the
    mean of the ratio. χ²(trainer ‖ engine) = E[w²] − 1, w of a token (chi2_token) or of a response (chi2_seq).

    Args:
        as importance_weights.
    """
    mask = response_mask
    d = torch.where(mask, old_log_probs - rollout_log_probs, 0)
    near, near_row = d.clamp(-20, 20), d.sum(-1).clamp(-20, 20)
    rows, lengths = mask.any(-1), mask.sum(-1).clamp(min=1)
    trainer, engine = (-torch.where(mask, x, 0).sum(-1) / lengths for x in (old_log_probs, rollout_log_probs))
    apart = trainer - engine
    told = apart[rows] if rows.any() else apart.new_zeros(1)
    means = {
        "kl": masked_mean(-d, mask),
        "k3_kl": masked_mean(ESTIMATORS["k3"](near), mask),
        "training_ppl": masked_mean(trainer.exp(), rows),
        "rollout_ppl": masked_mean(engine.exp(), rows),
        "training_log_ppl": masked_mean(trainer, rows),
        "rollout_log_ppl": masked_mean(engine, rows),
        "log_ppl_diff": masked_mean(apart, rows),
        "log_ppl_abs_diff": masked_mean(apart.abs(), rows),
        "log_ppl_diff_max": told.max(),
        "log_ppl_diff_min": told.min(),
        "ppl_ratio": masked_mean(apart.exp(), rows),
        "chi2_token": masked_mean(torch.expm1(2 * near), mask),
        "chi2_seq": masked_mean(torch.expm1(2 * near_row), rows),
    }
    return {name: value.item() for name, value in means.items()}


def weight_metrics(
    weights: Tensor, raw: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> dict[str, float]:
    """rollout_is_{mean,max,min,std,eff_sample_size} of the bounded weights, over the sampled tokens, as verl
    tells them: before rollout_is_batch_normalize; and max and min of a response's weight before it is bounded,
    where verl's are. With IcePop's two bounds rollout_is_oob_ratio is the share of the tokens beyond them.

    Args:
        weights, raw: [B, T], bounded and not.
        config: with rollout_is.
    """
    told = spread(weights, response_mask)
    if config.rollout_is == "sequence":
        told |= {name: value for name, value in spread(raw, response_mask).items() if name in ("max", "min")}
    metrics = {SPREAD_NAMES[name][0]: value for name, value in told.items()}
    low, high = config.bounds
    if low is not None:
        beyond = ((raw < low) | (raw > high)).float()
        metrics["rollout_is_oob_ratio"] = masked_mean(beyond, response_mask).item()
    return metrics


def spread(weights: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Mean, least, greatest, deviation and effective sample size of weights over the sampled tokens; nothing
    where there are none.

    The effective sample size is (Σw)²/(n·Σw²), the share of the n tokens that would tell as much if they were
    weighted alike (Kish 1965, "Survey Sampling"): 1 where all weights are equal, 1/n where one is all, 0 where
    none is left.

    Args:
        weights: [B, T].
        response_mask: [B, T] bool.
    """
    w = weights[response_mask].double()
    if not len(w):
        return {}
    squares = w.square().sum()
    return {
        "mean": w.mean().item(),
        "min": w.min().item(),
        "max": w.max().item(),
        "std": w.std(correction=0).item(),
        "eff_sample_size": (w.sum().square() / (len(w) * squares)).item() if squares else 0.0,
    }
