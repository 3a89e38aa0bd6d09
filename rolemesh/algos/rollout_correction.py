"""Corrects for the mismatch between the engine's distribution and the trainer's.

The engine samples with other kernels, another precision, or older weights than the trainer.
d = old_log_probs − rollout_log_probs, both of the sampled token. w = exp(d) is its importance weight: a token
that the engine sampled too often counts less.
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
    """Compute w = exp(d) for each token, or exp(Σ d) of the whole response on each of its tokens.

    The weight of a response is unbiased, but its variance grows with the length. The weight of a token has a
    small variance, but ignores that the engine sampled the tokens before it too (Precup et al. 2000,
    "Eligibility traces for off-policy policy evaluation").

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
    """Truncate weights to min(w, high), which bounds the variance at the cost of some bias.

    Sources: Ionides 2008, "Truncated importance sampling"; Espeholt et al. 2018, arXiv:1802.01561, eq. 1. With
    `low`, weights outside [low, high] become 0 instead (IcePop, Ling Team 2025): a token on which engine and
    trainer differ too much is not trained on.

    Args:
        weights: from importance_weights.
        low, high: RolloutCorrectionConfig.bounds.
    """
    if low is None:
        return weights.clamp(max=high)
    return torch.where((weights >= low) & (weights <= high), weights, 0)


def normalised(
    weights: Tensor, response_mask: Tensor, *, level: Literal["token", "sequence"]
) -> tuple[Tensor, float]:
    """Divide weights by their mean, so that the correction does not change the size of the step.

    Args:
        weights: [B, T], bounded, of the whole batch.
        response_mask: [B, T] bool.
        level: token: the mean is over tokens. sequence: it is over responses, which have one weight each.

    Returns:
        The weights, and the divisor: their mean, or 1 if that is at most 1e-8 (IcePop may reject every token).
    """
    if level == "sequence":
        mean = masked_mean(weights.amax(-1), response_mask.any(-1)).item()
    else:
        mean = masked_mean(weights, response_mask).item()
    factor = mean if mean > 1e-8 else 1.0
    return weights / factor, factor


# Estimates of KL(engine ‖ trainer) from d (Schulman 2020, joschu.net/blog/kl-approx.html).
MISMATCH_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: torch.expm1(d) - d,  # expm1: for near-equal policies exp(d) − 1 is mostly rounding
}
# Statistics, [b, T] or [b, 1], of an estimate [b, T] that is 0 on masked cells.
STATISTICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask: values,
    "seq_sum": lambda values, mask: values.sum(-1, keepdim=True),
    "seq_mean": lambda values, mask: values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1),
    "seq_max": lambda values, mask: values.amax(-1, keepdim=True),
}


def accepted_tokens(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, criteria: Iterable[Criterion]
) -> Tensor:
    """Return response_mask without the tokens or whole responses that any criterion rejects.

    Source: Liu et al. 2025, "When Speed Kills Stability". k1 is −d, so its bounds apply to the log of the ratio
    rollout/old, the inverse of w.

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
    """Compute the statistic that the criterion bounds, [b, T] or [b, 1]."""
    d = torch.where(response_mask, old_log_probs - rollout_log_probs, 0).clamp(-20, 20)
    return STATISTICS[criterion.over](MISMATCH_ESTIMATORS[criterion.estimator](d), response_mask)


# Each key of `spread` to its metrics: of the bounded weights, and of the weights before they are bounded.
SPREAD_NAMES = {
    "mean": ("rollout_is_mean", "rollout_is_raw_mean"),
    "min": ("rollout_is_min", "rollout_is_raw_min"),
    "max": ("rollout_is_max", "rollout_is_raw_max"),
    "std": ("rollout_is_std", "rollout_is_raw_std"),
    "eff_sample_size": ("rollout_is_eff_sample_size", "rollout_is_raw_eff_sample_size"),
}


@dataclass(frozen=True)
class Correction:
    """The result of algorithm.rollout_correction for a batch.

    Args:
        weights: [B, T], multiply the policy loss; None without rollout_is.
        accepted: [B, T] bool, the tokens of the loss; None without rollout_rs.
        metrics: by name; docs/metrics.md explains each.
    """

    weights: Tensor | None
    accepted: Tensor | None
    metrics: dict[str, float]


def correct(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Compute weights, mask and metrics of a batch.

    Args:
        old_log_probs, rollout_log_probs, response_mask: as importance_weights.
        config: algorithm.rollout_correction.
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
    """Compute the share of sampled tokens that are rejected, and of rows that lose at least one."""
    rejected = response_mask & ~accepted
    return {
        "rollout_rs_masked_fraction": masked_mean(rejected.float(), response_mask).item(),
        "rollout_rs_seq_masked_fraction": rejected.any(-1).float().mean().item(),
    }


def mismatch_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
) -> dict[str, float]:
    """Measure how far the trainer's policy is from the engine's.

    kl: mean of −d, in nats per token sampled by the engine.
    k3_kl: mean of exp(d) − 1 − d, which is never negative and has less variance; nats per token.
    training_ppl, rollout_ppl: mean over rows of the perplexity exp(−mean log-probability).
    training_log_ppl, rollout_log_ppl: mean over rows of its logarithm.
    log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min: the trainer's log perplexity less the
        engine's: mean, mean absolute value, maximum and minimum over the rows.
    ppl_ratio: mean over rows of the trainer's perplexity over the engine's.
    chi2_token, chi2_seq: χ²(trainer ‖ engine) = E[w²] − 1, with w of a token or of a response.

    Args:
        old_log_probs, rollout_log_probs, response_mask: as importance_weights.
    """
    mask = response_mask
    d = torch.where(mask, old_log_probs - rollout_log_probs, 0)
    near = d.clamp(-20, 20)
    near_row = d.sum(-1).clamp(-20, 20)
    rows = mask.any(-1)
    lengths = mask.sum(-1).clamp(min=1)
    trainer, engine = (-torch.where(mask, x, 0).sum(-1) / lengths for x in (old_log_probs, rollout_log_probs))
    apart = trainer - engine
    of_rows = apart[rows] if rows.any() else apart.new_zeros(1)
    means = {
        "kl": masked_mean(-d, mask),
        "k3_kl": masked_mean(MISMATCH_ESTIMATORS["k3"](near), mask),
        "training_ppl": masked_mean(trainer.exp(), rows),
        "rollout_ppl": masked_mean(engine.exp(), rows),
        "training_log_ppl": masked_mean(trainer, rows),
        "rollout_log_ppl": masked_mean(engine, rows),
        "log_ppl_diff": masked_mean(apart, rows),
        "log_ppl_abs_diff": masked_mean(apart.abs(), rows),
        "log_ppl_diff_max": of_rows.max(),
        "log_ppl_diff_min": of_rows.min(),
        "ppl_ratio": masked_mean(apart.exp(), rows),
        "chi2_token": masked_mean(torch.expm1(2 * near), mask),
        "chi2_seq": masked_mean(torch.expm1(2 * near_row), rows),
    }
    return {name: value.item() for name, value in means.items()}


def weight_metrics(
    weights: Tensor, raw: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> dict[str, float]:
    """Compute rollout_is_{mean,max,min,std,eff_sample_size} over the sampled tokens, with verl's definitions.

    They describe the bounded weights, before rollout_is_batch_normalize. With rollout_is sequence, max and min
    are of the weights before they are bounded, as in verl. With IcePop's two bounds, rollout_is_oob_ratio is
    the share of tokens outside them.

    Args:
        weights, raw: [B, T], after and before bounding.
        response_mask: [B, T] bool.
        config: algorithm.rollout_correction, with rollout_is set.
    """
    bounded = spread(weights, response_mask)
    if config.rollout_is == "sequence":
        bounded |= {name: value for name, value in spread(raw, response_mask).items() if name in ("max", "min")}
    metrics = {SPREAD_NAMES[name][0]: value for name, value in bounded.items()}
    low, high = config.bounds
    if low is not None:
        beyond = ((raw < low) | (raw > high)).float()
        metrics["rollout_is_oob_ratio"] = masked_mean(beyond, response_mask).item()
    return metrics


def spread(weights: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Compute mean, min, max, std and effective sample size of weights over the sampled tokens.

    The result is empty if there are no sampled tokens. The effective sample size is (Σw)²/(n·Σw²) (Kish 1965,
    "Survey Sampling"), the share of the n tokens that would be as informative with equal weights. It is 1 if
    all weights are equal, 1/n if only one is not 0, and 0 if all are 0.

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
