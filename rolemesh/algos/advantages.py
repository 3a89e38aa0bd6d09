"""Advantage estimators that use one response at a time: how much better a token was than expected.

Estimators that compare the responses to one prompt are in group_advantages.py. The table of all estimators is
in rolemesh/catalog/estimators.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rolemesh.algos.aggregation import masked_whiten


def compute_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    Tokens that the policy did not sample (a tool's output, padding) are skipped: the next value and the running
    advantage pass through them unchanged. Their own rewards and values are not used.

    Args:
        token_level_rewards: [B, T] float32, KL penalty already subtracted.
        values: [B, T] float32, the critic's value before token t is sampled.
        response_mask: [B, T] bool, True on tokens that the policy sampled.

    Returns:
        advantages [B, T], not whitened; returns = advantages + values [B, T]. Masked cells are not zeroed.

    Raises:
        ValueError: the tensors differ in shape.
    """
    require_one_shape(token_level_rewards=token_level_rewards, values=values, response_mask=response_mask)
    next_value = running = torch.zeros_like(values[:, 0])
    found = []
    for reward, value, sampled in backwards(token_level_rewards, values, response_mask):
        delta = reward + gamma * next_value - value
        running = torch.where(sampled, delta + gamma * lam * running, running)
        next_value = torch.where(sampled, value, next_value)
        found.append(running)
    advantages = torch.stack(found[::-1], dim=1)
    return advantages, advantages + values


def compute_whitened_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute PPO's advantages and returns: `compute_gae`, advantages whitened over the batch's sampled tokens.

    The returns are not whitened: the critic is trained on them as they are.
    """
    advantages, returns = compute_gae(token_level_rewards, values, response_mask, gamma=gamma, lam=lam)
    return masked_whiten(advantages, response_mask), returns


def compute_reinforce_plus_plus(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): the discounted return to go, whitened over the batch.

    Args:
        token_level_rewards: [B, T] float32.
        response_mask: [B, T] bool.
        gamma: algorithm.gamma.

    Returns:
        advantages [B, T], 0 where response_mask is False; returns [B, T], not whitened.
    """
    returns = return_to_go(token_level_rewards, response_mask, gamma)
    return torch.where(response_mask, masked_whiten(returns, response_mask), 0), returns


def compute_remax(
    token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor
) -> tuple[Tensor, Tensor]:
    """ReMax (Li et al. 2023, arXiv:2310.10505): the return to go, less the reward of the greedy answer to the
    same prompt.

    Args:
        token_level_rewards: [B, T] float32.
        response_mask: [B, T] bool.
        reward_baselines: [B] float32, the reward of the greedy answer to the row's prompt.

    Returns:
        advantages [B, T]; returns [B, T].
    """
    returns = return_to_go(token_level_rewards, response_mask)
    return returns - torch.where(response_mask, reward_baselines[:, None], 0), returns


def return_to_go(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Compute the return to go G [B, T]: a sampled token's reward plus γ times G of the next sampled token.

    Other tokens are skipped, as in `compute_gae`, so a turn before a tool's output is credited with the rewards
    after it. They hold G of the next sampled token, or 0 if none follows.

    Raises:
        ValueError: the tensors differ in shape.
    """
    require_one_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)
    running = torch.zeros_like(token_level_rewards[:, 0])
    found = []
    for reward, sampled in backwards(token_level_rewards, response_mask):
        running = torch.where(sampled, reward + gamma * running, running)
        found.append(running)
    return torch.stack(found[::-1], dim=1)


def backwards(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the columns [B] of tensors [B, T], from the last token to the first.

    Each is contiguous: walking the columns of the tensors as they are takes two to three times as long.
    """
    columns = [tensor.t().contiguous().unbind() for tensor in tensors]
    return zip(*map(reversed, columns), strict=True)


def require_one_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape [B, T]."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"expected tensors of one shape [B, T]; got {shapes}")
