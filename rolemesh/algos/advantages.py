"""How much better a token or a response was than expected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def compute_gae(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    Tokens that the policy did not sample (a tool's output, padding) are stepped over: the next value and the
    running advantage pass through them unchanged, and what they hold themselves is not used.

    Args:
        token_level_rewards: [B, T] float32, KL penalty already subtracted.
        values: [B, T] float32, the critic's value before token t is sampled.
        response_mask: [B, T] bool, True on tokens that the policy sampled.

    Returns:
        advantages [B, T], not whitened; returns = advantages + values [B, T]. Masked cells are not zeroed.

    Raises:
        ValueError: the tensors differ in shape.
    """
    _same_shape(token_level_rewards=token_level_rewards, values=values, response_mask=response_mask)
    next_value = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(next_value)
    advantages = torch.empty_like(values)
    for t in reversed(range(values.shape[1])):
        sampled = response_mask[:, t]
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(sampled, delta + gamma * lam * running, running)
        next_value = torch.where(sampled, values[:, t], next_value)
        advantages[:, t] = running
    return advantages, advantages + values


def compute_grpo(
    token_level_rewards: Tensor, response_mask: Tensor, uid: Sequence[str], *, norm_by_std: bool = True
) -> tuple[Tensor, Tensor]:
    """A response's reward against the others to the same prompt (Shao et al. 2024, arXiv:2402.03300).

    A = (r − μ)/(σ + 1e-6) on every sampled token; r is the response's reward, μ and σ (Bessel's) are its
    group's. Without the division it is Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). A group of one has μ = 0
    and σ = 1: its reward is kept.

    Args:
        token_level_rewards: [B, T] float32.
        response_mask: [B, T] bool.
        uid: [B], the prompt of each row.
        norm_by_std: algorithm.norm_adv_by_std_in_grpo.

    Returns:
        advantages [B, T], 0 where response_mask is False; returns, the same.

    Raises:
        ValueError: the tensors differ in shape, or uid in length.
    """
    _same_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)
    if len(uid) != len(token_level_rewards):
        raise ValueError(f"{len(uid)} uids for {len(token_level_rewards)} rows")
    names, inverse = np.unique(np.asarray(uid, dtype=str), return_inverse=True)
    group = torch.from_numpy(inverse.reshape(-1)).to(token_level_rewards.device)
    # float64: in float32 the mean of equal rewards may miss them by a rounding error, and the 1e-6 in the
    # denominator would make an advantage of it
    rewards = token_level_rewards.double().sum(-1)
    zeros = rewards.new_zeros(len(names))
    size = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = torch.where(size > 1, zeros.index_add(0, group, rewards) / size, 0)
    centred = rewards - mean[group]
    variance = zeros.index_add(0, group, centred.square()) / (size - 1).clamp(min=1)
    std = torch.where(size > 1, variance.sqrt(), 1)
    scores = centred / (std[group] + 1e-6) if norm_by_std else centred
    # 0.0 and nothing else on padding: a product's −0.0 among them would have the padding sent (docs/wire.md)
    advantages = torch.where(response_mask, scores.to(token_level_rewards.dtype)[:, None], 0)
    return advantages, advantages


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"tensors of one shape [B, T] expected; got {shapes}")
