"""From per-token numbers to one."""

from __future__ import annotations

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from rolemesh.algos.aggregation import Aggregation, BatchCounts, masked_mean, masked_sum, masked_whiten
from rolemesh.errors import InvalidConfig

LOSSES = tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 9.0, 9.0, 9.0]])
MASK = tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()
# token sums 3, 20, 0; token means 1.5, 20/3, 0; 5 tokens, 3 rows, T = 4
EXPECTED = {
    "token-mean": 23 / 5,
    "token-sum": 23.0,
    "seq-mean-token-sum": 23 / 3,
    "seq-mean-token-mean": (1.5 + 20 / 3) / 3,
    "seq-mean-token-sum-norm": 23 / 3 / 4,
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_each_mode_gives_the_number_worked_by_hand(mode: str) -> None:
    assert Aggregation.of(BatchCounts.of(MASK), mode)(LOSSES, MASK).item() == pytest.approx(EXPECTED[mode])


@pytest.mark.parametrize("mode", EXPECTED)
def test_micro_batch_shares_add_up_to_the_mini_batch_loss(mode: str) -> None:
    whole = Aggregation.of(BatchCounts.of(MASK), mode)
    for cuts in ([1, 2], [2, 1], [1, 1, 1]):
        shares = [whole(a, b) for a, b in zip(LOSSES.split(cuts), MASK.split(cuts), strict=True)]
        assert sum(share.item() for share in shares) == pytest.approx(EXPECTED[mode])


def test_the_scale_factor_replaces_the_response_length() -> None:
    assert Aggregation.of(BatchCounts.of(MASK), "seq-mean-token-sum-norm", 10)(
        LOSSES, MASK
    ).item() == pytest.approx(23 / 3 / 10)


@pytest.mark.parametrize("mode", EXPECTED)
def test_a_mini_batch_without_sampled_tokens_has_no_loss(mode: str) -> None:
    nothing = torch.zeros_like(MASK)
    losses = LOSSES.clone().requires_grad_()
    loss = Aggregation.of(BatchCounts.of(nothing), mode)(losses, nothing)
    loss.backward()
    assert loss.item() == 0
    assert losses.grad is not None
    assert losses.grad.abs().sum() == 0


@pytest.mark.parametrize("mode", EXPECTED)
def test_masked_cells_do_not_matter(mode: str) -> None:
    losses = torch.where(MASK, LOSSES, float("nan")).requires_grad_()
    loss = Aggregation.of(BatchCounts.of(MASK), mode)(losses, MASK)
    loss.backward()
    assert loss.item() == pytest.approx(EXPECTED[mode])
    assert losses.grad is not None
    assert torch.equal(losses.grad != 0, MASK)


@pytest.mark.parametrize("mode", EXPECTED)
def test_the_loss_of_one_token_is_the_loss(mode: str) -> None:
    one = tensor([[True]])
    assert Aggregation.of(BatchCounts.of(one), mode)(tensor([[3.0]]), one).item() == 3.0


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(InvalidConfig, match="token-mode"):
        Aggregation.of(BatchCounts.of(MASK), "token-mode")


def test_masked_cells_count_in_no_sum_and_no_mean() -> None:
    assert masked_sum(LOSSES, MASK).item() == 23
    assert masked_mean(LOSSES, MASK).item() == pytest.approx(4.6)
    assert masked_mean(LOSSES, torch.zeros_like(MASK)).item() == 0


def test_whitening_gives_unmasked_cells_mean_0_and_variance_1() -> None:
    """Unmasked 1, 2, 3: mean 2, variance (1 + 0 + 1)/2 = 1. The masked cell is moved alike, not zeroed."""
    values = tensor([[1.0, 2.0], [3.0, 10.0]])
    mask = tensor([[True, True], [True, False]])
    assert_close(masked_whiten(values, mask), tensor([[-1.0, 0.0], [1.0, 8.0]]))


def test_whitening_divides_by_the_number_of_cells_less_one() -> None:
    """1 and 3: variance (1 + 1)/1."""
    assert_close(masked_whiten(tensor([[1.0, 3.0]]), tensor([[True, True]])), tensor([[-1.0, 1.0]]) / 2**0.5)


def test_whitening_a_single_cell_gives_zero() -> None:
    assert masked_whiten(tensor([[5.0, 7.0]]), tensor([[True, False]]))[0, 0] == 0
