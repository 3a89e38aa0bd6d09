"""Policy losses, per token. rolemesh/catalog/policy_losses.py declares each loss and its keys.

Each function takes
    log_probs: [b, T], of the policy under training, π, with gradient.
    old_log_probs: [b, T], before the update, π_old; ρ = π/π_old.
    advantages: [b, T], A.
    response_mask: [b, T] bool, the tokens of the loss.
    clip_low, clip_high: the clip range; low and high in the formulas below.
A token's loss depends only on that token or its row, so it does not depend on the micro-batches. Anything that
depends on the whole mini-batch is passed as an argument of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rolemesh.algos.rollout_correction import accepted_tokens, bounded, importance_weights
from rolemesh.config.rollout_correction import RolloutCorrectionConfig


@dataclass(frozen=True)
class TokenLosses:
    """The result of a policy loss.

    Args:
        losses: [b, T], to be aggregated; masked cells hold arbitrary numbers.
        shares: metric name under actor/ to a [b, T] tensor without gradient. Its mean over the tokens of the
            loss is reported.
        accepted: [b, T] bool, the tokens that the loss keeps; None: all of response_mask.
        of_rows: as shares, [b]; the mean over rows is reported.
    """

    losses: Tensor
    shares: dict[str, Tensor] = field(default_factory=dict)
    accepted: Tensor | None = None
    of_rows: dict[str, Tensor] = field(default_factory=dict)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log ρ clamped to ±20: exp() of one stale outlier would swamp the mean of the batch."""
    return (log_probs - old_log_probs).clamp(-20, 20)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return [b, 1], the mean of each row over the cells where mask is True; 0 if there are none."""
    return torch.where(mask, values, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _indicator(condition: Tensor, like: Tensor) -> Tensor:
    return condition.to(like.dtype)


def vanilla_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float,
) -> TokenLosses:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), with the dual clip (Ye et al.
    2019, arXiv:1912.09729, eq. 5).

    max(−ρA, −clip(ρ, 1 − low, 1 + high)·A). Where A < 0 the loss is at most −c·A with c = clip_ratio_c. This
    keeps a token that the new policy finds far likelier from dominating the step.
    """
    d = log_ratio(log_probs, old_log_probs)
    free, clipped = _surrogates(d.exp(), advantages, clip_low, clip_high)
    single = torch.maximum(free, clipped)
    bound = -clip_ratio_c * advantages
    negative = advantages < 0
    shares = {
        "ppo_kl": -d.detach(),
        "pg_clipfrac": _indicator(clipped > free, d),
        "pg_clipfrac_lower": _indicator((single > bound) & negative, d),
    }
    return TokenLosses(torch.where(negative, torch.minimum(single, bound), single), shares)


def _surrogates(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return −ρA, and the same with ρ clipped to [1 − low, 1 + high]."""
    return -ratio * advantages, -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages


def supervised_loss(log_probs: Tensor, response_mask: Tensor) -> TokenLosses:
    """Supervised fine-tuning (Ouyang et al. 2022, arXiv:2203.02155, section 3.5): −log π, the cross-entropy of
    the tokens of response_mask."""
    return TokenLosses(-log_probs)


def gpg_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor
) -> TokenLosses:
    """REINFORCE (Williams 1992), as in Group Policy Gradient (Chu et al. 2025, arXiv:2504.02546): −A·log π.

    It has no ratio, so it is meant for one optimizer step on each batch.
    """
    return TokenLosses(-advantages * log_probs)


def gspo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """Group Sequence Policy Optimization (Zheng et al. 2025, arXiv:2507.18071, eq. 13).

    PPO's clip, without the dual clip, on s = sg(exp(mean_t log ρ))·π/sg(π). s has the value of the response's
    length-normalized ratio and the gradient of the token's π. s is at most e^10. The paper's mean is over the
    tokens of a row and then over rows: loss_agg_mode seq-mean-token-mean.
    """
    d = log_ratio(log_probs, old_log_probs)
    log_s = row_mean(d.detach(), response_mask) + log_probs - log_probs.detach()
    free, clipped = _surrogates(log_s.clamp(max=10).exp(), advantages, clip_low, clip_high)
    shares = {"ppo_kl": -d.detach(), "pg_clipfrac": _indicator(clipped > free, d)}
    return TokenLosses(torch.maximum(free, clipped), shares)


def cispo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """CISPO (MiniMax-M1 2025, arXiv:2506.13585, eq. 4): −sg(clip(ρ, 1 − low, 1 + high))·A·log π.

    Only the weight is clipped, so every token keeps its gradient. If low is 1 or more, only high applies.
    """
    d = log_ratio(log_probs, old_log_probs)
    ratio = d.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    shares = {"ppo_kl": -d.detach(), "pg_clipfrac": _indicator(ratio != weight, d)}
    return TokenLosses(-weight * advantages * log_probs, shares)


def sapo_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> TokenLosses:
    """Soft Adaptive Policy Optimization (Gao et al. 2025, arXiv:2511.20347): −A·sigmoid(τ(ρ − 1))·4/τ.

    The gate replaces the clip: its slope in ρ is 1 at ρ = 1 and falls off smoothly. τ is tau_pos where A > 0,
    else tau_neg.
    """
    d = log_ratio(log_probs, old_log_probs)
    above, below = advantages.new_tensor([tau_pos, tau_neg])
    tau = torch.where(advantages > 0, above, below)
    gate = torch.sigmoid(tau * (d.exp() - 1)) * 4 / tau
    return TokenLosses(-gate * advantages, {"ppo_kl": -d.detach()})


def clip_cov_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    chosen: Tensor,
) -> TokenLosses:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617, eq. 12): PPO's clip, without the dual clip.

    The loss of the chosen tokens, some of those that reduce the entropy most, is 0.

    Args:
        chosen: [b, T] bool, from covariance.choose_clip_cov.
    """
    d = log_ratio(log_probs, old_log_probs)
    losses = torch.maximum(*_surrogates(d.exp(), advantages, clip_low, clip_high))
    shares = {"ppo_kl": -d.detach(), "pg_clipfrac": _indicator(chosen, d)}
    return TokenLosses(torch.where(chosen, 0, losses), shares)


def kl_cov_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    ppo_kl_coef: float,
    chosen: Tensor,
) -> TokenLosses:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617, eq. 13): −ρA, and on the chosen tokens ppo_kl_coef·|log ρ|.

    The metric ppo_kl is the mean of |log ρ| here.

    Args:
        chosen: [b, T] bool, from covariance.choose_kl_cov.
    """
    d = log_ratio(log_probs, old_log_probs)
    penalty = ppo_kl_coef * d.abs()
    losses = -d.exp() * advantages + torch.where(chosen, penalty, 0)
    return TokenLosses(losses, {"ppo_kl": d.detach().abs()})


def geo_mean_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLosses:
    """Geometric-Mean Policy Optimization (Zhao et al. 2025, arXiv:2507.20673, eq. 4).

    −Ā·exp(mean_t log ρ), with each log ρ clipped to [−low, high] where that lowers A·log ρ. Ā is the row's mean
    advantage, so use an estimator with one advantage for a response. Each of a row's tokens holds the row's
    loss, so the mean over the batch is seq-mean-token-mean.
    """
    d = log_ratio(log_probs, old_log_probs)
    held = d.clamp(-clip_low, clip_high)
    sign = advantages.sign()
    least = sign * torch.minimum(sign * d, sign * held)
    losses = -row_mean(advantages, response_mask) * row_mean(least, response_mask).exp()
    shares = {
        "ppo_kl": -d.detach(),
        "pg_clipfrac": _indicator((d != held) & (advantages > 0), d),
        "pg_clipfrac_lower": _indicator((d != held) & (advantages < 0), d),
    }
    return TokenLosses(losses.expand_as(d), shares)


def dppo_tv_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float,
) -> TokenLosses:
    """Divergence PPO, total variation (arXiv:2602.04879): −A·sg(min(ρ, c))·log π with c = clip_ratio_c.

    A token is masked if its probability has risen by more than high (A > 0) or fallen by more than low (else).
    """
    moved = (log_probs.exp() - old_log_probs.exp()).detach()
    inside = torch.where(advantages > 0, moved <= clip_high, moved >= -clip_low)
    return _dppo(log_probs, old_log_probs, advantages, inside, clip_ratio_c)


def dppo_kl_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float,
) -> TokenLosses:
    """Divergence PPO, KL (arXiv:2602.04879): as dppo_tv, with KL(π_old ‖ π) of "this token or another".

    A token is masked only if its probability has moved in the direction of A.
    """
    new = log_probs.detach().exp()
    old = old_log_probs.exp()
    # 1e-8: if the token has probability 1, the others have 0, and the ratio would be 0/0
    others = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    kl = old * (old_log_probs - log_probs.detach()) + others
    inside = torch.where(
        advantages > 0,
        (kl <= clip_high) | (new <= old),
        (kl <= clip_low) | (new >= old),
    )
    return _dppo(log_probs, old_log_probs, advantages, inside, clip_ratio_c)


def _dppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, inside: Tensor, clip_ratio_c: float
) -> TokenLosses:
    d = log_ratio(log_probs, old_log_probs).detach()
    ratio = d.exp()
    losses = -advantages * ratio.clamp(max=clip_ratio_c) * log_probs
    shares = {
        "ppo_kl": -d,
        "pg_clipfrac": _indicator(~inside, d),
        "pg_clipfrac_lower": _indicator((ratio > clip_ratio_c) & inside, d),
    }
    return TokenLosses(torch.where(inside, losses, 0), shares)


def dro_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, *, dro_beta: float
) -> TokenLosses:
    """Direct Reward Optimisation (Richemond et al. 2024, arXiv:2405.19107): −(A·log π − ½β·log²ρ).

    A quadratic penalty with β = dro_beta replaces the clip.
    """
    d = log_ratio(log_probs, old_log_probs)
    losses = -(advantages * log_probs - 0.5 * dro_beta * d.square())
    return TokenLosses(losses, {"ppo_kl": -d.detach()})


def bypass_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_ratio_c: float,
    correction: RolloutCorrectionConfig,
) -> TokenLosses:
    """The loss of bypass mode (Liu et al. 2025, "When Speed Kills Stability"): the engine's policy is π_old.

    loss_type ppo_clip is the vanilla loss, and its ratio corrects for the engine. reinforce is −w·A·log π with
    w = sg(π/π_rollout), by token or sequence as rollout_is says and bounded by its threshold. Without
    rollout_is w is 1. Tokens that rollout_rs rejects, by the policy under training, are left out of the loss.

    Args:
        old_log_probs: the engine's.
        correction: algorithm.rollout_correction.
    """
    now = log_probs.detach()
    accepted = accepted_tokens(now, old_log_probs, response_mask, correction.criteria)
    if correction.loss_type == "ppo_clip":
        tokens = vanilla_policy_loss(
            log_probs,
            old_log_probs,
            advantages,
            response_mask,
            clip_low=clip_low,
            clip_high=clip_high,
            clip_ratio_c=clip_ratio_c,
        )
        losses = tokens.losses
        shares = tokens.shares
    else:
        losses = -advantages * log_probs
        shares = {"ppo_kl": -log_ratio(now, old_log_probs)}
        if correction.rollout_is:
            w = importance_weights(now, old_log_probs, response_mask, level=correction.rollout_is)
            losses = losses * bounded(w, *correction.bounds)
    return TokenLosses(losses, shares, accepted)


def scale_losses(losses: Tensor, weights: Tensor, mask: Tensor, *, by_row: bool) -> Tensor:
    """Multiply the losses of tokens by their importance weights.

    Args:
        losses: [b, T].
        weights: [b, T], rollout_is_weights.
        mask: [b, T] bool, the tokens of the loss.
        by_row: the loss is defined for rows, so each token gets the geometric mean of its row's weights.
    """
    # 1e-10: a weight of 0, which IcePop may give, makes the row's weight very small
    return losses * (row_mean((weights + 1e-10).log(), mask).exp() if by_row else weights)
