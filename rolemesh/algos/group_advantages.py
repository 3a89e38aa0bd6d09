"""How much better a response was than the others to the same prompt.

r is a response's reward, Σ_t of its token rewards; μ and σ are those of its group, σ with Bessel's correction;
a group of one has μ = 0 and σ = 1. Every function takes

    token_level_rewards: [B, T] float32.
    response_mask: [B, T] bool.
    uid: [B], the prompt of each row.

returns advantages [B, T], 0 where response_mask is False, and returns, the same tensor unless it says
otherwise; and raises ValueError where the tensors differ in shape, or uid in length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rolemesh.algos.advantages import require_one_shape, return_to_go
from rolemesh.algos.aggregation import masked_whiten
from rolemesh.algos.groups import Groups


def compute_grpo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str], *, norm_adv_by_std_in_grpo: bool
) -> tuple[Tensor, Tensor]:
    """(r − μ)/(σ + 1e-6) (Shao et al. 2024, arXiv:2402.03300); without the division it is Dr. GRPO (Liu et al.
    2025, arXiv:2503.20783). A group of one keeps its reward."""
    rewards = outcomes(token_level_rewards, response_mask)
    scores = _compared(rewards, Groups.of(uid, response_mask), norm_adv_by_std_in_grpo)
    return _on_tokens(scores, token_level_rewards, response_mask)


def compute_grpo_passk(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str], *, norm_adv_by_std_in_grpo: bool
) -> tuple[Tensor, Tensor]:
    """(r₁ − r₂)/(σ + 1e-6) for the best response of a group, r₂ the second best; 0 for the others (Tang et al.
    2025, arXiv:2503.19595): what the best adds to the best of all others.

    Raises:
        ValueError: a group of one.
    """
    rewards = outcomes(token_level_rewards, response_mask)
    groups = Groups.of(uid, response_mask)
    if (alone := (groups.size < 2).nonzero().flatten()).numel():
        raise ValueError(f"grpo_passk needs two responses to a prompt; {uid[int(alone[0])]} has one")
    best = groups.max(rewards)
    is_best = rewards == best
    second = groups.max(torch.where(is_best, -torch.inf, rewards))
    second = torch.where(groups.sum(is_best.double()) > 1, best, second)  # two that are best add nothing
    scores = torch.where(is_best, best - second, 0)
    if norm_adv_by_std_in_grpo:
        scores = scores / (groups.std(rewards) + 1e-6)
    return _on_tokens(scores, token_level_rewards, response_mask)


def compute_gdpo(
    reward_components: Tensor,
    response_mask: Tensor,
    uid: Sequence[str],
    *,
    gdpo_reward_keys: Sequence[str],
    gdpo_reward_weights: Sequence[float] | None,
    norm_adv_by_std_in_grpo: bool,
) -> tuple[Tensor, Tensor]:
    """Σ_k w_k·GRPO_k over the components of the reward, whitened over the batch (Liu et al. 2026,
    arXiv:2601.05242): no component drowns in the spread of another.

    Args:
        reward_components: [B, K] float32.
        gdpo_reward_keys: their K names.
        gdpo_reward_weights: K of them; None: all 1.

    Raises:
        ValueError: another number of names or weights than of components.
    """
    groups = Groups.of(uid, response_mask)
    components = reward_components.double().unbind(1)
    weights = [1.0] * len(gdpo_reward_keys) if gdpo_reward_weights is None else gdpo_reward_weights
    scores = torch.zeros(len(response_mask), dtype=torch.float64, device=response_mask.device)
    for weight, rewards in zip(weights, components, strict=True):
        scores += weight * _compared(rewards, groups, norm_adv_by_std_in_grpo)
    return _whitened_on_tokens(scores, reward_components, response_mask)


def compute_reinforce_plus_plus_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """r − μ, whitened over the batch (Hu 2025, arXiv:2501.03262)."""
    rewards = outcomes(token_level_rewards, response_mask)
    scores = rewards - Groups.of(uid, response_mask).mean(rewards)
    return _whitened_on_tokens(scores, token_level_rewards, response_mask)


def compute_rloo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """(r − μ)·n/(n − 1): the reward, less the mean of the n − 1 others (Ahmadian et al. 2024,
    arXiv:2402.14740). A group of one keeps its reward."""
    rewards = outcomes(token_level_rewards, response_mask)
    groups = Groups.of(uid, response_mask)
    others = groups.size / (groups.size - 1).clamp(min=1)
    return _on_tokens((rewards - groups.mean(rewards)) * others, token_level_rewards, response_mask)


def compute_opo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """r − Σℓr/Σℓ, ℓ the length (Hao et al. 2025, arXiv:2505.23585): the baseline of least variance where a
    response's gradient grows with its length. A group of one keeps its reward."""
    rewards = outcomes(token_level_rewards, response_mask)
    groups = Groups.of(uid, response_mask)
    lengths = response_mask.sum(-1).double()
    baseline = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    return _on_tokens(rewards - torch.where(groups.size > 1, baseline, 0), token_level_rewards, response_mask)


def compute_gpg(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """α·(r − μ), with α = B/(rows whose r − μ is not 0) (Chu et al. 2025, arXiv:2504.02546; its F_norm is 1): a
    group without a spread says nothing, and should not make the step smaller either."""
    rewards = outcomes(token_level_rewards, response_mask)
    scores = rewards - Groups.of(uid, response_mask).mean(rewards)
    alpha = len(scores) / max(1, int(scores.count_nonzero()))
    return _on_tokens(alpha * scores, token_level_rewards, response_mask)


def compute_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Sequence[str],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    *,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """G_t − ΣG_t·W_t/ΣW_t over the group, token position by token position (Li et al. 2026, arXiv:2602.07078).

    G is the return to go. W_t = Σ_{j≤t} w_j, w = 1 − 2π + Σ_v π(v)², is the squared norm of the gradient of the
    logits up to there: a response that was uncertain says more about the baseline. At a position where no other
    response of the group has a token there is no baseline: G stays.

    Args:
        old_log_probs: [B, T], log π of the token.
        sum_pi_squared: [B, T], Σ_v π(v)² of the distribution that it was drawn from.
        rollout_is_weights: [B, T], which the loss is multiplied by, where it is; w is by their squares.

    Returns:
        advantages; returns = G [B, T].
    """
    returns = return_to_go(token_level_rewards, response_mask)
    energy = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if rollout_is_weights is not None:
        energy = energy * rollout_is_weights.square()
    weights = torch.where(response_mask, energy, 0).cumsum(-1) * response_mask
    groups = Groups.of(uid, response_mask)
    baseline = groups.sum(returns * weights) / (groups.sum(weights) + 1e-8)
    has_others = groups.sum(response_mask.int()) > 1
    return torch.where(response_mask, returns - torch.where(has_others, baseline, 0), 0), returns


def compute_egpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Sequence[str],
    entropys: Tensor,
    think_mask: Tensor,
    *,
    norm_adv_by_std_in_grpo: bool,
    egpo_lambda: float,
    egpo_alpha: float,
) -> tuple[Tensor, Tensor]:
    """A + λ·clip(H, −|A|/α, |A|/α), A of GRPO (Hao et al. 2025, arXiv:2508.05118): thoughts of a high entropy
    are explored, but the bonus never outweighs what the reward said.

    Args:
        entropys: [B, T], of the distributions that the tokens were drawn from, in nats.
        think_mask: [B, T] bool, the tokens whose mean entropy is H.
        egpo_lambda: λ, the weight of the bonus.
        egpo_alpha: α, the bonus is at most |A|/α.
    """
    rewards = outcomes(token_level_rewards, response_mask)
    scores = _compared(rewards, Groups.of(uid, response_mask), norm_adv_by_std_in_grpo)
    thought = think_mask & response_mask
    entropy = torch.where(thought, entropys.double(), 0).sum(-1) / thought.sum(-1).clamp(min=1)
    bound = scores.abs() / egpo_alpha
    return _on_tokens(scores + egpo_lambda * entropy.clamp(-bound, bound), token_level_rewards, response_mask)


def outcomes(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """r [B] float64. In float32 the mean of equal rewards may miss them by a rounding error, and the 1e-6 in
    GRPO's denominator would make an advantage of it."""
    require_one_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)
    return token_level_rewards.double().sum(-1)


def _compared(rewards: Tensor, groups: Groups, by_std: bool) -> Tensor:
    centred = rewards - groups.mean(rewards)
    return centred / (groups.std(rewards) + 1e-6) if by_std else centred


def _on_tokens(scores: Tensor, like: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """scores [B] on each sampled token, of the dtype of `like`."""
    # 0.0 and nothing else on padding: a product's −0.0 among them would have the padding sent (docs/wire.md)
    advantages = torch.where(response_mask, scores.to(like.dtype)[:, None], 0)
    return advantages, advantages


def _whitened_on_tokens(scores: Tensor, like: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages, _ = _on_tokens(scores, like, response_mask)
    advantages = torch.where(response_mask, masked_whiten(advantages, response_mask), 0)
    return advantages, advantages
