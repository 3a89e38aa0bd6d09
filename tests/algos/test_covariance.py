"""Tokens that clip_cov and kl_cov choose among a whole mini-batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.covariance import choose_clip_cov, choose_kl_cov, token_covariances, token_keys
from rolemesh.config.actor import ActorConfig, PolicyLossConfig
from tests.support.rows.losses import options_of

MASK = tensor([[True, True, True], [True, False, False]])
# means over the four tokens: A 1, log π -2
ADVANTAGES = tensor([[3.0, 1.0, -1.0], [1.0, 50.0, math.nan]])
LOG_PROBS = tensor([[-1.0, -1.0, -3.0], [-3.0, -50.0, math.nan]])
KEYS = tensor([[0.3, 0.2, 0.1], [0.4, 0.0, 0.0]])


def config(**settings: Any) -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(**settings))


def test_token_covariance_is_the_product_of_deviations() -> None:
    expected = tensor([[2.0, 0.0, 2.0], [0.0, -math.inf, -math.inf]], dtype=torch.float64)
    assert_close(token_covariances(LOG_PROBS, ADVANTAGES, MASK), expected)


def test_a_token_alone_has_no_covariance() -> None:
    alone = tensor([[True, False, False]])
    assert token_covariances(LOG_PROBS[:1], ADVANTAGES[:1], alone)[0, 0] == 0


def chosen_by(choose: Any, keys: Tensor = KEYS, old: Tensor = LOG_PROBS, **settings: Any) -> list[Any]:
    options = options_of(choose, config(**settings))
    found: list[Any] = choose(LOG_PROBS, old, ADVANTAGES, MASK, keys, **options).nonzero().tolist()
    return found


def test_kl_cov_chooses_the_highest_and_at_least_one() -> None:
    assert chosen_by(choose_kl_cov, kl_cov_ratio=0.5) == [[0, 0], [0, 2]]
    assert chosen_by(choose_kl_cov, kl_cov_ratio=1e-4) == [[0, 2]]  # of two equal ones that with the least key
    assert chosen_by(choose_kl_cov, -KEYS, kl_cov_ratio=0.74) == [[0, 0], [0, 2]]  # 2.96 of 4 tokens are 2
    assert chosen_by(choose_kl_cov, kl_cov_ratio=0.75) == [[0, 0], [0, 1], [0, 2]]
    assert len(chosen_by(choose_kl_cov, kl_cov_ratio=1.0)) == 4


def test_clip_cov_draws_among_those_between_its_bounds() -> None:
    assert chosen_by(choose_clip_cov, clip_cov_ratio=0.25) == [[0, 2]]
    assert chosen_by(choose_clip_cov, -KEYS, clip_cov_ratio=0.25) == [[0, 0]]
    assert chosen_by(choose_clip_cov, clip_cov_ratio=1.0) == [[0, 0], [0, 2]]
    assert chosen_by(choose_clip_cov, clip_cov_ratio=1e-4) == [[0, 2]]
    assert chosen_by(choose_clip_cov, clip_cov_ratio=1.0, clip_cov_lb=2.0) == []  # bounds are outside
    assert chosen_by(choose_clip_cov, clip_cov_ratio=1.0, clip_cov_ub=2.0) == []
    assert chosen_by(choose_clip_cov, clip_cov_ratio=1.0, clip_cov_lb=-1, clip_cov_ub=1) == [[0, 1], [1, 0]]


def test_clip_cov_leaves_tokens_that_the_clip_holds_already() -> None:
    """The first has A > 0 and ρ = e^0.5 > 1.2, the third A < 0 and ρ = e^0.5, which is not held."""
    assert chosen_by(choose_clip_cov, old=LOG_PROBS - 0.5, clip_cov_ratio=1.0) == [[0, 2]]
    assert chosen_by(choose_clip_cov, old=LOG_PROBS + 0.5, clip_cov_ratio=1.0) == [[0, 0]]  # ρ = e^-0.5 < 0.8


@pytest.mark.parametrize("choose", [choose_clip_cov, choose_kl_cov])
def test_without_a_token_none_is_chosen(choose: Any) -> None:
    nothing = torch.zeros_like(MASK)
    options = options_of(choose, ActorConfig())
    assert not choose(LOG_PROBS, LOG_PROBS, ADVANTAGES, nothing, KEYS, **options).any()


@pytest.mark.parametrize("equal_advantages", [False, True])
@pytest.mark.parametrize("choose", [choose_clip_cov, choose_kl_cov])
def test_the_order_of_rows_changes_no_choice(choose: Any, equal_advantages: bool) -> None:
    """Nor where all covariances are equal but for rounding: 0.1 in float64, summed in two orders."""
    generator = torch.Generator().manual_seed(0)
    log_probs, advantages = (torch.randn(40, 30, dtype=torch.float64, generator=generator) for _ in range(2))
    ids = torch.randint(0, 99, (40, 50), generator=generator)
    mask = torch.rand(40, 30, generator=generator) < 0.8
    if equal_advantages:
        advantages = torch.full_like(advantages, 0.1)
    settings = config(clip_cov_ratio=0.05, kl_cov_ratio=0.05, clip_cov_lb=-9, clip_cov_ub=9)

    def chosen(order: Tensor) -> Tensor:
        keys = token_keys(ids[order], torch.ones(40, 50), 30, [42, 7])
        rows = (log_probs[order], log_probs[order], advantages[order], mask[order])
        found: Tensor = choose(*rows, keys, **options_of(choose, settings))
        return found[order.argsort()]

    expected = chosen(torch.arange(40))
    assert expected.sum() == int(0.05 * int(mask.sum()))
    for seed in range(3):
        assert torch.equal(chosen(torch.randperm(40, generator=generator.manual_seed(seed))), expected)


def test_keys_follow_from_the_seed_and_the_rows_own_tokens() -> None:
    ids = tensor([[1, 2, 3], [4, 5, 6], [1, 2, 9]])
    mask = tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    keys = token_keys(ids, mask, 2, [42, 7])
    assert keys.unique().numel() == 6
    assert torch.equal(token_keys(ids[[2, 0]], mask[[2, 0]], 2, [42, 7]), keys[[2, 0]])
    for seed in ([43, 7], [42, 8]):
        assert not torch.equal(token_keys(ids, mask, 2, seed), keys)
    longer = token_keys(tensor([[1, 2, 1]]), tensor([[1, 1, 1]]), 2, [42, 7])
    assert not torch.equal(longer, keys[2:])  # padding is no token, not even that of id 1
    padded = torch.where(mask.bool(), ids, 77)
    assert torch.equal(token_keys(padded, mask, 2, [42, 7]), keys)
