"""Policy losses, per token. `POLICY_LOSSES` maps actor.policy_loss.loss_mode to the function.

Each takes
    log_probs: [b, T], of the policy under training, π, with gradient.
    old_log_probs: [b, T], before the update, π_old; ρ = π/π_old.
    advantages: [b, T], A.
    response_mask: [b, T] bool, the tokens of the loss.
    config: the ranges: low and high are clip_ratio_low and clip_ratio_high.
A token's loss depends on that token alone, or on its row: how rows are cut into micro-batches does not matter.
What must be known of the whole mini-batch comes as an argument of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rolemesh.algos.covariance import choose_clip_cov, choose_kl_cov
from rolemesh.algos.rollout_correction import accepted_tokens, bounded, importance_weights
from rolemesh.config.actor import ActorConfig
from rolemesh.config.rollout_correction import RolloutCorrectionConfig


@dataclass(frozen=True)
class TokenLosses:
    """What a policy loss gives.

    Args:
        losses: [b, T], to be aggregated; masked cells hold anything.
        shares: name under actor/ to a [b, T] tensor without gradient, whose mean over the tokens that count for
            the loss is reported.
        accepted: [b, T] bool, where the loss itself leaves tokens out; None: all of response_mask count.
    """

    losses: Tensor
    shares: dict[str, Tensor] = field(default_factory=dict)
    accepted: Tensor | None = None


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log ρ, in ±20: exp() of one stale outlier would swamp the mean of the batch."""
    return (log_probs - old_log_probs).clamp(-20, 20)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[b, 1]: mean of each row over the cells where mask is True; 0 where it is True nowhere."""
    return torch.where(mask, values, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _indicator(condition: Tensor, like: Tensor) -> Tensor:
    return condition.to(like.dtype)


def vanilla_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7), with the dual clip (Ye et al.
    2019, arXiv:1912.09729, eq. 5).

    max(−ρA, −clip(ρ, 1 − low, 1 + high)·A); where A < 0 at most −c·A with c = clip_ratio_c, so that one token
    which the new policy finds far likelier cannot take over the step.
    """
    d = log_ratio(log_probs, old_log_probs)
    free, clipped = _surrogates(d.exp(), advantages, config)
    single = torch.maximum(free, clipped)
    bound = -config.clip_ratio_c * advantages
    negative = advantages < 0
    shares = {
        "ppo_kl": -d.detach(),
        "pg_clipfrac": _indicator(clipped > free, d),
        "pg_clipfrac_lower": _indicator((single > bound) & negative, d),
    }
    return TokenLosses(torch.where(negative, torch.minimum(single, bound), single), shares)


def _surrogates(ratio: Tensor, advantages: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """−ρA, and the same with ρ held in [1 − low, 1 + high]."""
    return -ratio * advantages, -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages


def gpg_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """−A·log π, REINFORCE (Williams 1992), as Group Policy Gradient takes it (Chu et al. 2025,
    arXiv:2504.02546). No ratio: for one optimizer step on each batch."""
    return TokenLosses(-advantages * log_probs)


def gspo_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """Group Sequence Policy Optimization (Zheng et al. 2025, arXiv:2507.18071, eq. 13).

    PPO's clip, not dual, on s = sg(exp(mean_t log ρ))·π/sg(π): the value of the response's ratio, its length
    taken out, and the gradient of the token's. s is at most e^10. The paper's mean is over the tokens of a row
    and then over rows: loss_agg_mode seq-mean-token-mean.
    """
    d = log_ratio(log_probs, old_log_probs)
    log_s = row_mean(d.detach(), response_mask) + log_probs - log_probs.detach()
    free, clipped = _surrogates(log_s.clamp(max=10).exp(), advantages, config)
    shares = {"ppo_kl": -d.detach(), "pg_clipfrac": _indicator(clipped > free, d)}
    return TokenLosses(torch.maximum(free, clipped), shares)


def cispo_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """−sg(clip(ρ, 1 − low, 1 + high))·A·log π: what is clipped is the weight, so that no token loses its
    gradient (MiniMax-M1 2025, arXiv:2506.13585, eq. 4). low may be 1 or more: then only high holds."""
    d = log_ratio(log_probs, old_log_probs)
    ratio = d.detach().exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    shares = {"ppo_kl": -d.detach(), "pg_clipfrac": _indicator(ratio != weight, d)}
    return TokenLosses(-weight * advantages * log_probs, shares)


def sapo_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """Soft Adaptive Policy Optimization (Gao et al. 2025, arXiv:2511.20347): −A·sigmoid(τ(ρ − 1))·4/τ.

    A gate in place of the clip: its slope in ρ is 1 at ρ = 1 and falls off smoothly, with τ = tau_pos where
    A > 0, else tau_neg.
    """
    d = log_ratio(log_probs, old_log_probs)
    above, below = advantages.new_tensor([config.tau_pos, config.tau_neg])
    tau = torch.where(advantages > 0, above, below)
    gate = torch.sigmoid(tau * (d.exp() - 1)) * 4 / tau
    return TokenLosses(-gate * advantages, {"ppo_kl": -d.detach()})


def clip_cov_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    *,
    chosen: Tensor,
) -> TokenLosses:
    """Clip-Cov (Cui et al. 2025, arXiv:2505.22617, eq. 12): PPO's clip, not dual, with a few of the tokens that
    cost the most entropy taken out.

    Args:
        chosen: [b, T] bool, those, from covariance.choose_clip_cov.
    """
    d = log_ratio(log_probs, old_log_probs)
    losses = torch.maximum(*_surrogates(d.exp(), advantages, config))
    shares = {"ppo_kl": -d.detach(), "pg_clipfrac": _indicator(chosen, d)}
    return TokenLosses(torch.where(chosen, 0, losses), shares)


def kl_cov_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    *,
    chosen: Tensor,
) -> TokenLosses:
    """KL-Cov (Cui et al. 2025, arXiv:2505.22617, eq. 13): −ρA, and on the chosen tokens ppo_kl_coef·|log ρ|.

    ppo_kl is here the mean of |log ρ|.

    Args:
        chosen: [b, T] bool, from covariance.choose_kl_cov.
    """
    d = log_ratio(log_probs, old_log_probs)
    penalty = config.policy_loss.ppo_kl_coef * d.abs()
    losses = -d.exp() * advantages + torch.where(chosen, penalty, 0)
    return TokenLosses(losses, {"ppo_kl": d.detach().abs()})


def geo_mean_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """Geometric-Mean Policy Optimization (Zhao et al. 2025, arXiv:2507.20673, eq. 4).

    −Ā·exp(mean_t log ρ), each log ρ held in [−low, high] where that lowers A·log ρ; Ā is the row's mean
    advantage, so an estimator with one advantage for a response is meant. The mean over the batch is
    seq-mean-token-mean, as each of a row's tokens bears the row's loss.
    """
    d = log_ratio(log_probs, old_log_probs)
    held = d.clamp(-config.clip_low, config.clip_high)
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
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """Divergence PPO, total variation (arXiv:2602.04879): −A·sg(min(ρ, c))·log π with c = clip_ratio_c, masked
    where the token's probability has moved further than high up (A > 0) or low down (else)."""
    moved = (log_probs.exp() - old_log_probs.exp()).detach()
    inside = torch.where(advantages > 0, moved <= config.clip_high, moved >= -config.clip_low)
    return _dppo(log_probs, old_log_probs, advantages, inside, config)


def dppo_kl_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """Divergence PPO, KL (arXiv:2602.04879): as dppo_tv, where the divergence is KL(π_old ‖ π) of "this token
    or another", and only a token that has moved in A's direction is masked."""
    new, old = log_probs.detach().exp(), old_log_probs.exp()
    # 1e-8: a token that is all but certain leaves nothing for the others
    others = (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
    kl = old * (old_log_probs - log_probs.detach()) + others
    inside = torch.where(
        advantages > 0,
        (kl <= config.clip_high) | (new <= old),
        (kl <= config.clip_low) | (new >= old),
    )
    return _dppo(log_probs, old_log_probs, advantages, inside, config)


def _dppo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, inside: Tensor, config: ActorConfig
) -> TokenLosses:
    d = log_ratio(log_probs, old_log_probs).detach()
    ratio = d.exp()
    losses = -advantages * ratio.clamp(max=config.clip_ratio_c) * log_probs
    shares = {
        "ppo_kl": -d,
        "pg_clipfrac": _indicator(~inside, d),
        "pg_clipfrac_lower": _indicator((ratio > config.clip_ratio_c) & inside, d),
    }
    return TokenLosses(torch.where(inside, losses, 0), shares)


def dro_policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: ActorConfig
) -> TokenLosses:
    """Direct Reward Optimisation (Richemond et al. 2024, arXiv:2405.19107): −(A·log π − ½β·log²ρ), a quadratic
    penalty in place of the clip; β = dro_beta."""
    assert config.policy_loss.dro_beta is not None, "refused when the job is read"
    d = log_ratio(log_probs, old_log_probs)
    losses = -(advantages * log_probs - 0.5 * config.policy_loss.dro_beta * d.square())
    return TokenLosses(losses, {"ppo_kl": -d.detach()})


def bypass_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: ActorConfig,
    *,
    correction: RolloutCorrectionConfig,
) -> TokenLosses:
    """Two policies in place of three (Liu et al. 2025, "When Speed Kills Stability"): π_old is the engine's.

    loss_type ppo_clip is vanilla; its ratio corrects for the engine. reinforce is −w·A·log π with
    w = sg(π/π_rollout), which rollout_is and its threshold bound; without rollout_is w is 1. What rollout_rs
    rejects, by the policy under training, is out of the loss.

    Args:
        old_log_probs: the engine's.
        correction: algorithm.rollout_correction.
    """
    now = log_probs.detach()
    accepted = accepted_tokens(now, old_log_probs, response_mask, correction.criteria)
    if correction.loss_type == "ppo_clip":
        tokens = vanilla_policy_loss(log_probs, old_log_probs, advantages, response_mask, config)
        losses, shares = tokens.losses, tokens.shares
    else:
        losses, shares = -advantages * log_probs, {"ppo_kl": -log_ratio(now, old_log_probs)}
        if correction.rollout_is:
            w = importance_weights(now, old_log_probs, response_mask, level=correction.rollout_is)
            losses = losses * bounded(w, *correction.bounds)
    return TokenLosses(losses, shares, accepted)


@dataclass(frozen=True)
class PolicyLoss:
    """A loss, and what it needs besides.

    Args:
        of_tokens: the function.
        aggregation: in place of actor.loss_agg_mode, where the loss has one of its own.
        choose: which tokens are `chosen`, among all of the mini-batch: covariance.choose_clip_cov and
            choose_kl_cov.
        corrects: it takes `correction`.
        row_weights: it is the loss of a row, so a token's importance weight is the row's geometric mean.
    """

    of_tokens: Callable[..., TokenLosses]
    aggregation: str | None = None
    choose: Callable[..., Tensor] | None = None
    corrects: bool = False
    row_weights: bool = False

    def weights(self, weights: Tensor, mask: Tensor) -> Tensor:
        """What a token's loss is multiplied by, from rollout_is_weights [b, T]."""
        # 1e-10: a weight of 0, as IcePop gives, makes the row's very small
        return row_mean((weights + 1e-10).log(), mask).exp() if self.row_weights else weights


ROWS = "seq-mean-token-mean"
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(vanilla_policy_loss),
    "gpg": PolicyLoss(gpg_policy_loss),
    "gspo": PolicyLoss(gspo_policy_loss),
    "cispo": PolicyLoss(cispo_policy_loss),
    "sapo": PolicyLoss(sapo_policy_loss, aggregation=ROWS),
    "clip_cov": PolicyLoss(clip_cov_policy_loss, choose=choose_clip_cov),
    "kl_cov": PolicyLoss(kl_cov_policy_loss, choose=choose_kl_cov),
    "geo_mean": PolicyLoss(geo_mean_policy_loss, aggregation=ROWS, row_weights=True),
    "dppo_tv": PolicyLoss(dppo_tv_policy_loss),
    "dppo_kl": PolicyLoss(dppo_kl_policy_loss),
    "dro": PolicyLoss(dro_policy_loss),
    "bypass": PolicyLoss(bypass_policy_loss, corrects=True),
}
