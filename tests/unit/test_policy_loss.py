"""Policy and value losses by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.aggregation import Aggregation
from rolemesh.algos.policy_loss import Clip, TokenLosses, vanilla_policy_loss
from rolemesh.algos.value_loss import clipped_value_loss

CLIP = Clip(low=0.2, high=0.3, dual=3.0)


def loss_of(ratio: Tensor, advantages: Tensor) -> TokenLosses:
    return vanilla_policy_loss(ratio.log(), torch.zeros_like(ratio), advantages, torch.ones(1).bool(), CLIP)


def test_the_clipped_surrogate_by_hand() -> None:
    ratio = tensor([1.0, 1.5, 0.5, 1.5, 0.5, 4.0])
    advantages = tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    result = loss_of(ratio, advantages)
    # free; held at 1.3; free; free, the worse; held at 0.8; dual clip: 3·2 and not 4·2
    assert_close(result.losses, tensor([-2.0, -2.6, -1.0, 3.0, 1.6, 6.0]))
    assert torch.equal(result.shares["pg_clipfrac"], tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0]))
    assert torch.equal(result.shares["pg_clipfrac_lower"], tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]))
    assert_close(result.shares["ppo_kl"], -ratio.log())


def test_no_gradient_flows_where_the_clip_holds() -> None:
    log_ratio = tensor([1.0, 1.5, 0.5, 4.0]).log().requires_grad_()
    advantages = tensor([2.0, 2.0, -2.0, -2.0])
    vanilla_policy_loss(
        log_ratio, torch.zeros(4), advantages, torch.ones(4).bool(), CLIP
    ).losses.sum().backward()
    assert log_ratio.grad is not None
    assert_close(log_ratio.grad, tensor([-2.0, 0.0, 0.0, 0.0]))


def test_an_outlier_is_held_at_a_log_ratio_of_20() -> None:
    far = vanilla_policy_loss(tensor([90.0]), tensor([0.0]), tensor([-1e-9]), torch.ones(1).bool(), CLIP)
    assert far.losses.isfinite().all()
    assert_close(far.shares["ppo_kl"], tensor([-20.0]))
    rare = vanilla_policy_loss(tensor([-90.0]), tensor([0.0]), tensor([1.0]), torch.ones(1).bool(), CLIP)
    assert rare.losses.item() == pytest.approx(-math.exp(-20))


def test_the_value_loss_by_hand() -> None:
    """Returns 1: free (0.1, 0.5, −2) has errors² 0.81, 0.25, 9; held within ±0.2 of the old 0, (0.1, 0.2, −0.2)
    has 0.81, 0.64, 1.44."""
    values, mask = tensor([[0.1, 0.5, -2.0, 9.0]]), tensor([[True, True, True, False]])
    loss, clipped = clipped_value_loss(
        values,
        torch.zeros(1, 4),
        torch.ones(1, 4),
        mask,
        cliprange_value=0.2,
        aggregate=Aggregation.of(mask),
    )
    assert loss.item() == pytest.approx(0.5 * (0.81 + 0.64 + 9) / 3)
    assert torch.equal(clipped[mask], tensor([0.0, 1.0, 0.0]))


def test_no_value_within_its_range_counts_as_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    old = 3 * torch.randn(64, 64, generator=generator)
    values, mask = old + torch.rand(64, 64, generator=generator) * 0.9 - 0.45, torch.ones(64, 64).bool()
    _, clipped = clipped_value_loss(
        values, old, -old, mask, cliprange_value=0.5, aggregate=Aggregation.of(mask)
    )
    assert clipped.sum() == 0


def test_no_gradient_flows_where_a_value_has_moved_far_enough() -> None:
    values = tensor([[0.1, 0.5, -2.0]]).requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, _ = clipped_value_loss(
        values,
        torch.zeros(1, 3),
        torch.ones(1, 3),
        mask,
        cliprange_value=0.2,
        aggregate=Aggregation.of(mask, "token-sum"),
    )
    loss.backward()
    assert values.grad is not None
    assert_close(values.grad, tensor([[-0.9, 0.0, -3.0]]))
