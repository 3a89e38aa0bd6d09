"""Advantage estimators that compare a response with the others to the same prompt (its group).

r is a response's reward, Σ_t of its token rewards. μ and σ are mean and standard deviation of r over the group,
σ with Bessel's correction. A group of one has μ = 0 and σ = 1. Every function takes

    token_level_rewards: [B, T] float32.
    response_mask: [B, T] bool.
    uid: [B], the prompt of each row.

Every function returns advantages [B, T], 0 where response_mask is False, and returns, which are the same tensor
unless the function's docstring says otherwise. It raises ValueError if the tensors differ in shape, or if uid
has another length.
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
    """GRPO (Shao et al. 2024, arXiv:2402.03300): (r − μ)/(σ + 1e-6).

    Without the division it is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). A group of one keeps its reward,
    divided by 1 + 1e-6 if norm_adv_by_std_in_grpo.
    """
    rewards = outcomes(token_level_rewards, response_mask)
    scores = _compared(rewards, Groups.of(uid, response_mask), norm_adv_by_std_in_grpo)
    return _on_tokens(scores, token_level_rewards, response_mask)


def compute_grpo_by_turn(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    uid: Sequence[str],
    turns: Tensor,
    *,
    norm_adv_by_std_in_grpo: bool,
) -> tuple[Tensor, Tensor]:
    """GRPO turn by turn: (G_k − μ_k)/(σ_k + 1e-6) on the tokens of a row's k-th turn.

    G_k is the sum of the row's rewards from its k-th turn on. μ_k and σ_k are over the rows of the group that
    have a k-th turn; if only one row has it, that row gets 0 there. So a turn is compared with the same turn of
    other rows, and earlier rewards do not count for it. This is the turn-level credit of Zeng et al. 2025,
    arXiv:2505.11821, with returns to go, which needs only one group for each prompt. With one turn it is GRPO.

    Args:
        turns: [B, T] int64, k on the tokens of a row's k-th turn.
    """
    require_one_shape(token_level_rewards=token_level_rewards, response_mask=response_mask, turns=turns)
    turns = torch.where(response_mask, turns, 0)
    advantages = torch.zeros_like(token_level_rewards)
    for turn in range(1, int(turns.max()) + 1 if turns.numel() else 1):
        rows = (turns == turn).any(-1).nonzero().flatten()
        own = turns[rows] == turn
        groups = Groups.of([uid[row] for row in rows.tolist()], own)
        to_go = (token_level_rewards[rows].double() * (turns[rows] >= turn)).sum(-1)
        scores = torch.where(groups.size > 1, _compared(to_go, groups, norm_adv_by_std_in_grpo), 0)
        advantages[rows] += _on_tokens(scores, token_level_rewards, own)[0]
    return advantages, advantages


def compute_grpo_passk(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str], *, norm_adv_by_std_in_grpo: bool
) -> tuple[Tensor, Tensor]:
    """Pass@k GRPO (Tang et al. 2025, arXiv:2503.19595): (r₁ − r₂)/(σ + 1e-6) for the best response of a group.

    r₁ is the best reward of the group and r₂ the second best; the other responses get 0. If two responses tie
    for the best, all get 0. norm_adv_by_std_in_grpo switches the division on.

    Raises:
        ValueError: a group has one response.
    """
    rewards = outcomes(token_level_rewards, response_mask)
    groups = Groups.of(uid, response_mask)
    if (alone := (groups.size < 2).nonzero().flatten()).numel():
        raise ValueError(
            f"grpo_passk needs at least two responses to a prompt; uid {uid[int(alone[0])]} has one"
        )
    best = groups.max(rewards)
    is_best = rewards == best
    second = groups.max(torch.where(is_best, -torch.inf, rewards))
    second = torch.where(groups.sum(is_best.double()) > 1, best, second)  # a tie for the best
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
    """GDPO (Liu et al. 2026, arXiv:2601.05242): Σ_k w_k·GRPO_k over reward components, whitened over the batch.

    Each component is normalized by itself, so one with a large spread cannot hide the others.

    Args:
        reward_components: [B, K] float32.
        gdpo_reward_keys: names of the K components.
        gdpo_reward_weights: K weights; None: all 1.

    Raises:
        ValueError: the number of names or weights is not K.
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
    """REINFORCE++ with a group baseline (Hu 2025, arXiv:2501.03262): r − μ, whitened over the batch."""
    rewards = outcomes(token_level_rewards, response_mask)
    scores = rewards - Groups.of(uid, response_mask).mean(rewards)
    return _whitened_on_tokens(scores, token_level_rewards, response_mask)


def compute_rloo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): the reward, less the mean of the n − 1 others.

    Computed as (r − μ)·n/(n − 1). A group of one keeps its reward.
    """
    rewards = outcomes(token_level_rewards, response_mask)
    groups = Groups.of(uid, response_mask)
    others = groups.size / (groups.size - 1).clamp(min=1)
    return _on_tokens((rewards - groups.mean(rewards)) * others, token_level_rewards, response_mask)


def compute_opo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """OPO (Hao et al. 2025, arXiv:2505.23585): r − Σℓr/Σℓ, with ℓ the length of a response.

    This baseline has the least variance if a response's gradient grows with its length. A group of one keeps
    its reward.
    """
    rewards = outcomes(token_level_rewards, response_mask)
    groups = Groups.of(uid, response_mask)
    lengths = response_mask.sum(-1).double()
    baseline = groups.sum(lengths * rewards) / groups.sum(lengths).clamp(min=1)
    return _on_tokens(rewards - torch.where(groups.size > 1, baseline, 0), token_level_rewards, response_mask)


def compute_gpg(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """GPG (Chu et al. 2025, arXiv:2504.02546, with F_norm = 1): α·(r − μ), α = B/(rows whose r − μ is not 0).

    A group with equal rewards carries no signal. The factor α keeps such groups from making the step smaller.
    """
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
    """Optimal token baseline (Li et al. 2026, arXiv:2602.07078): G_t − ΣG_t·W_t/ΣW_t over the group.

    The sums are taken at each token position separately. G is the return to go. W_t = Σ_{j≤t} w_j with
    w = 1 − 2π + Σ_v π(v)² is the squared norm of the gradient with respect to the logits up to token t. An
    uncertain response thus has more weight in the baseline. If no other response of the group has a token at a
    position, there is no baseline and the advantage is G.

    Args:
        old_log_probs: [B, T], log π of the token.
        sum_pi_squared: [B, T], Σ_v π(v)² of the distribution that it was drawn from.
        rollout_is_weights: [B, T], the importance weights that multiply the loss; w is multiplied by their
            squares. None: no importance weights.

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
    """EGPO (Hao et al. 2025, arXiv:2508.05118): A + λ·clip(H, −|A|/α, |A|/α), with A from GRPO.

    The bonus favours thoughts of high entropy; the clip bounds it by the size of the advantage.

    Args:
        entropys: [B, T], of the distributions that the tokens were drawn from, in nats.
        think_mask: [B, T] bool, the tokens whose mean entropy is H.
        egpo_lambda: λ, the weight of the bonus.
        egpo_alpha: α; the bonus is at most λ·|A|/α.
    """
    rewards = outcomes(token_level_rewards, response_mask)
    scores = _compared(rewards, Groups.of(uid, response_mask), norm_adv_by_std_in_grpo)
    thought = think_mask & response_mask
    entropy = torch.where(thought, entropys.double(), 0).sum(-1) / thought.sum(-1).clamp(min=1)
    bound = scores.abs() / egpo_alpha
    return _on_tokens(scores + egpo_lambda * entropy.clamp(-bound, bound), token_level_rewards, response_mask)


def outcomes(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the reward r of each response, [B] float64.

    In float32 the mean of equal rewards may differ from them by a rounding error. GRPO's denominator of 1e-6
    would turn that error into an advantage.
    """
    require_one_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)
    return token_level_rewards.double().sum(-1)


def _compared(rewards: Tensor, groups: Groups, by_std: bool) -> Tensor:
    centred = rewards - groups.mean(rewards)
    return centred / (groups.std(rewards) + 1e-6) if by_std else centred


def _on_tokens(scores: Tensor, like: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [B] on each sampled token, in the dtype of `like`; twice, as advantages and returns."""
    # where, not a product: −0.0 on padding would keep the wire from leaving the padding out (docs/wire.md)
    advantages = torch.where(response_mask, scores.to(like.dtype)[:, None], 0)
    return advantages, advantages


def _whitened_on_tokens(scores: Tensor, like: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages, _ = _on_tokens(scores, like, response_mask)
    advantages = torch.where(response_mask, masked_whiten(advantages, response_mask), 0)
    return advantages, advantages
