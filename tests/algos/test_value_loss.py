"""The value loss by hand."""

from __future__ import annotations

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from rolemesh.algos.aggregation import Aggregation, BatchCounts
from rolemesh.algos.value_loss import clipped_value_loss


def test_value_loss_is_half_the_larger_clipped_squared_error() -> None:
    """Returns 1: free (0.1, 0.5, −2) has errors² 0.81, 0.25, 9; held within ±0.2 of the old 0, (0.1, 0.2, −0.2)
    has 0.81, 0.64, 1.44."""
    values, mask = tensor([[0.1, 0.5, -2.0, 9.0]]), tensor([[True, True, True, False]])
    loss, clipped = clipped_value_loss(
        values,
        torch.zeros(1, 4),
        torch.ones(1, 4),
        mask,
        cliprange_value=0.2,
        aggregate=Aggregation.of(BatchCounts.of(mask)),
    )
    assert loss.item() == pytest.approx(0.5 * (0.81 + 0.64 + 9) / 3)
    assert torch.equal(clipped[mask], tensor([0.0, 1.0, 0.0]))


def test_a_value_that_falls_too_far_is_held_too() -> None:
    """Return −1: −0.5 has the error² 0.25; held at −0.2 it has 0.64."""
    one = torch.ones(1, 1)
    loss, clipped = clipped_value_loss(
        -0.5 * one,
        0 * one,
        -one,
        one.bool(),
        cliprange_value=0.2,
        aggregate=Aggregation.of(BatchCounts.of(one.bool())),
    )
    assert loss.item() == pytest.approx(0.32)
    assert clipped.item() == 1


def test_no_value_within_its_range_counts_as_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    old = 3 * torch.randn(64, 64, generator=generator)
    values, mask = old + torch.rand(64, 64, generator=generator) * 0.9 - 0.45, torch.ones(64, 64).bool()
    _, clipped = clipped_value_loss(
        values, old, -old, mask, cliprange_value=0.5, aggregate=Aggregation.of(BatchCounts.of(mask))
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
        aggregate=Aggregation.of(BatchCounts.of(mask), "token-sum"),
    )
    loss.backward()
    assert values.grad is not None
    assert_close(values.grad, tensor([[-0.9, 0.0, -3.0]]))
