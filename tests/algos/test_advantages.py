"""Advantages by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.advantages import compute_gae, return_to_go


def all_of(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def test_gae_with_lambda_one_is_discounted_return_minus_value() -> None:
    rewards, values = tensor([[0.0, 0.0, 1.0]]), tensor([[0.5, 0.4, 0.3]])
    advantages, returns = compute_gae(rewards, values, all_of(values), gamma=0.9, lam=1.0)
    assert_close(returns, tensor([[0.81, 0.90, 1.00]]))
    assert_close(advantages, tensor([[0.31, 0.50, 0.70]]))


def test_gae_with_lambda_zero_is_the_temporal_difference() -> None:
    rewards, values = tensor([[0.1, 0.0, 1.0]]), tensor([[0.5, 0.4, 0.3]])
    advantages, _ = compute_gae(rewards, values, all_of(values), gamma=0.9, lam=0.0)
    assert_close(advantages, tensor([[0.1 + 0.36 - 0.5, 0.27 - 0.4, 1 - 0.3]]))


def test_gae_is_the_discounted_sum_of_deltas() -> None:
    """δ = (0.5·2 − 1, 0.5·3 − 2, 4 − 3) = (0, −0.5, 1); A₂ = 1, A₁ = −0.5 + 0.25·1, A₀ = 0 + 0.25·A₁."""
    rewards, values = tensor([[0.0, 0.0, 4.0]]), tensor([[1.0, 2.0, 3.0]])
    advantages, returns = compute_gae(rewards, values, all_of(values), gamma=0.5, lam=0.5)
    assert_close(advantages, tensor([[-0.0625, -0.25, 1.0]]))
    assert_close(returns, tensor([[0.9375, 1.75, 4.0]]))


def test_gae_steps_over_tokens_that_the_policy_did_not_sample() -> None:
    """An observation in the middle and padding behind: the sampled tokens get what they would get alone."""
    alone, _ = compute_gae(
        tensor([[0.0, 0.0, 4.0]]),
        tensor([[1.0, 2.0, 3.0]]),
        torch.ones(1, 3, dtype=torch.bool),
        gamma=0.5,
        lam=0.5,
    )
    mask = tensor([[True, False, False, True, True, False]])
    rewards = tensor([[0.0, 7.0, 7.0, 0.0, 4.0, 7.0]])
    values = tensor([[1.0, 8.0, 8.0, 2.0, 3.0, 8.0]])
    advantages, returns = compute_gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert_close(advantages[mask], alone[0])
    # masked cells hold the running advantage, and are not zeroed
    assert_close(advantages[0, 1:3], tensor([-0.25, -0.25]))
    assert_close(returns, advantages + values)


def test_gae_of_rows_without_sampled_tokens_is_zero() -> None:
    values = tensor([[1.0, 2.0]])
    advantages, _ = compute_gae(values, values, torch.zeros(1, 2, dtype=torch.bool), gamma=1.0, lam=1.0)
    assert torch.equal(advantages, torch.zeros(1, 2))


def test_gae_of_a_response_of_one_token() -> None:
    advantages, returns = compute_gae(tensor([[2.0]]), tensor([[0.5]]), tensor([[True]]), gamma=0.9, lam=0.9)
    assert (advantages.item(), returns.item()) == (1.5, 2.0)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.95), (0.0, 0.5)])
@pytest.mark.parametrize("shape", [(1, 1), (5, 37)])
def test_gae_and_return_to_go_equal_their_recurrences_bitwise(
    shape: tuple[int, int], gamma: float, lam: float
) -> None:
    torch.manual_seed(0)
    rewards, values, mask = torch.randn(shape), torch.randn(shape), torch.rand(shape) < 0.7
    expected, to_go = torch.empty(shape), torch.empty(shape)
    following = running = total = torch.zeros(shape[0])
    for t in reversed(range(shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = torch.where(mask[:, t], delta + gamma * lam * running, running)
        following = torch.where(mask[:, t], values[:, t], following)
        total = torch.where(mask[:, t], rewards[:, t] + gamma * total, total)
        expected[:, t], to_go[:, t] = running, total
    advantages, returns = compute_gae(rewards, values, mask, gamma=gamma, lam=lam)
    assert torch.equal(advantages, expected)
    assert torch.equal(returns, expected + values)
    assert torch.equal(return_to_go(rewards, mask, gamma), to_go)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_gae_refuses_unequal_shapes(odd: int) -> None:
    rewards, values, mask = (torch.ones(2, 4 if odd == i else 3) for i in range(3))
    with pytest.raises(ValueError, match="one shape"):
        compute_gae(rewards, values, mask.bool(), gamma=1.0, lam=1.0)
