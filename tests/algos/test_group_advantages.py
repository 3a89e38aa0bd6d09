"""Advantages of responses among those to the same prompt, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.advantages import compute_reinforce_plus_plus, compute_remax, compute_whitened_gae
from rolemesh.algos.group_advantages import (
    compute_egpo,
    compute_gdpo,
    compute_gpg,
    compute_grpo,
    compute_grpo_by_turn,
    compute_grpo_passk,
    compute_opo,
    compute_optimal_token_baseline,
    compute_reinforce_plus_plus_baseline,
    compute_rloo,
)

# Outcomes 1, 3, 5, 5 of 2, 3, 2 and 3 tokens; the third response has an observation in its middle.
REWARDS = tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 5.0], [0.0, 5.0, 0.0]])
MASK = tensor([[1, 1, 0], [1, 1, 1], [1, 0, 1], [1, 1, 1]]).bool()


def outcomes(*rewards: float) -> tuple[Tensor, Tensor]:
    """Responses of one token each."""
    return tensor(rewards, dtype=torch.float32)[:, None], torch.ones(len(rewards), 1, dtype=torch.bool)


# ---------------------------------------------------------------------------------- GRPO and its kin


def test_grpo_compares_the_responses_to_one_prompt() -> None:
    """Group a holds 1 and 3: μ = 2, σ = √2. The rows of a group need not be neighbours."""
    rewards, mask = REWARDS[[0, 3, 1, 2]], MASK[[0, 3, 1, 2]]
    advantages, returns = compute_grpo(rewards, mask, ["a", "b", "a", "b"], norm_adv_by_std_in_grpo=True)
    score = 1 / (2**0.5 + 1e-6)
    assert_close(advantages, tensor([-score, 0.0, score, 0.0])[:, None] * mask)
    assert torch.equal(advantages, returns)


def test_a_turn_is_compared_with_the_same_turn_of_the_group() -> None:
    """From the first turn on the rows earn 1 + 2, 0 + 4 and 2: μ₁ = 3. From the second on, 2 and 4: μ₂ = 3."""
    rewards = tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 4.0], [0.0, 2.0, 0.0, 0.0]])
    turns = tensor([[1, -2, 2, 0], [1, 1, -2, 2], [1, 1, 0, 0]])
    centred, returns = compute_grpo_by_turn(
        rewards, turns > 0, ["a", "a", "a"], turns, norm_adv_by_std_in_grpo=False
    )
    assert torch.equal(centred, tensor([[0.0, 0, -1, 0], [1, 1, 0, 1], [-1, -1, 0, 0]]))
    assert torch.equal(returns, centred)
    normed, _ = compute_grpo_by_turn(rewards, turns > 0, ["a"] * 3, turns, norm_adv_by_std_in_grpo=True)
    assert_close(normed[:, 0], tensor([0.0, 1.0, -1.0]) / (1 + 1e-6))
    assert_close(normed[1, 3], tensor(1 / (2**0.5 + 1e-6)))


def test_a_row_that_is_alone_in_a_turn_learns_nothing_from_it() -> None:
    turns = tensor([[1, -2, 2], [1, 0, 0]])
    rewards = tensor([[0.0, 0.0, 4.0], [2.0, 0.0, 0.0]])
    advantages, _ = compute_grpo_by_turn(rewards, turns > 0, ["a", "a"], turns, norm_adv_by_std_in_grpo=False)
    assert torch.equal(advantages, tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("by_std", [True, False])
def test_with_one_turn_it_is_grpo_to_the_bit(by_std: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(24, 7, generator=generator) < 0.7
    mask[:, 0] = True
    rewards = torch.randn(24, 7, generator=generator) * mask
    uid = [f"{row % 5}" for row in range(24)]
    by_turn, _ = compute_grpo_by_turn(rewards, mask, uid, mask.long(), norm_adv_by_std_in_grpo=by_std)
    grpo, _ = compute_grpo(rewards, mask, uid, norm_adv_by_std_in_grpo=by_std)
    assert torch.equal(by_turn, grpo)


def test_a_millionth_is_added_to_the_deviation() -> None:
    """0 and 2e-6: μ = 1e-6 and σ = √2·1e-6."""
    rewards, mask = outcomes(0, 2e-6)
    grpo, _ = compute_grpo(rewards, mask, ["a", "a"], norm_adv_by_std_in_grpo=True)
    assert_close(grpo[:, 0], tensor([-1.0, 1.0]) / (math.sqrt(2) + 1))
    best, _ = compute_grpo_passk(rewards, mask, ["a", "a"], norm_adv_by_std_in_grpo=True)
    assert_close(best[:, 0], tensor([0.0, 2.0]) / (math.sqrt(2) + 1))


def test_dr_grpo_does_not_divide_by_the_deviation() -> None:
    advantages, _ = compute_grpo(REWARDS, MASK, ["a", "a", "b", "b"], norm_adv_by_std_in_grpo=False)
    assert torch.equal(advantages, tensor([-1.0, 1.0, 0.0, 0.0])[:, None] * MASK)


@pytest.mark.parametrize("by_std", [True, False])
def test_a_group_of_equals_gets_exactly_nothing(by_std: bool) -> None:
    """0.1 has no exact binary form: its mean over 3 rows in float32 is not 0.1, and 1e-6 divides."""
    advantages, _ = compute_grpo(*outcomes(0.1, 0.1, 0.1), ["a"] * 3, norm_adv_by_std_in_grpo=by_std)
    assert torch.equal(advantages, torch.zeros(3, 1))


def test_only_the_best_of_a_group_has_an_advantage_for_pass_at_k() -> None:
    """1, 4, 2 have μ = 7/3 and σ² = (16 + 25 + 1)/9/2 = 7/3. Of 5, 5, 0 the best adds nothing to the second."""
    rewards, mask = outcomes(1, 4, 5, 2, 5, 0)
    uid = ["a", "a", "b", "a", "b", "b"]
    advantages, _ = compute_grpo_passk(rewards, mask, uid, norm_adv_by_std_in_grpo=True)
    assert_close(advantages[:, 0], tensor([0.0, 2 / (math.sqrt(7 / 3) + 1e-6), 0.0, 0.0, 0.0, 0.0]))
    advantages, _ = compute_grpo_passk(rewards, mask, uid, norm_adv_by_std_in_grpo=False)
    assert torch.equal(advantages[:, 0], tensor([0.0, 2.0, 0.0, 0.0, 0.0, 0.0]))


def test_pass_at_k_needs_two_responses() -> None:
    with pytest.raises(ValueError, match="two responses to a prompt; uid b has one"):
        compute_grpo_passk(*outcomes(1, 2, 3), ["a", "a", "b"], norm_adv_by_std_in_grpo=True)


COMPONENTS = tensor([[1.0, 0.0], [0.0, 10.0], [0.0, 0.0], [0.0, 2.0]])  # of groups a, a, b, b
KEYS = ("right", "short")


def test_gdpo_compares_each_component_by_itself() -> None:
    """Every pair with a spread comes out as ±√½, the tenfold too; the third has none. So with weights 1 and ½
    the sums are ½√½·(1, −1, −1, 1): mean 0, variance (4/8)/3 = 1/6, whitened ½√½·√6 = ½√3."""
    advantages, returns = compute_gdpo(
        COMPONENTS, torch.ones(4, 1, dtype=torch.bool), ["a", "a", "b", "b"],
        gdpo_reward_keys=KEYS, gdpo_reward_weights=(1.0, 0.5), norm_adv_by_std_in_grpo=True,
    )  # fmt: skip
    assert_close(advantages[:, 0], tensor([1.0, -1.0, -1.0, 1.0]) * math.sqrt(3) / 2, rtol=1e-5, atol=1e-6)
    assert torch.equal(advantages, returns)


def test_gdpo_without_weights_weighs_alike() -> None:
    """√½·(1 − 1, −1 + 1, −1, 1) = √½·(0, 0, −1, 1): mean 0, variance (½ + ½)/3, whitened √½·√3."""
    advantages, _ = compute_gdpo(
        COMPONENTS, torch.ones(4, 1, dtype=torch.bool), ["a", "a", "b", "b"],
        gdpo_reward_keys=KEYS, gdpo_reward_weights=None, norm_adv_by_std_in_grpo=True,
    )  # fmt: skip
    assert_close(advantages[:, 0], tensor([0.0, 0.0, -1.0, 1.0]) * math.sqrt(1.5), rtol=1e-5, atol=1e-5)


def test_gdpo_without_weights_has_weights_of_1() -> None:
    """So small are the rewards that the 1e-8 of the whitening tells the scale."""
    found = [
        compute_gdpo(
            COMPONENTS * 1e-5, torch.ones(4, 1, dtype=torch.bool), ["a", "a", "b", "b"],
            gdpo_reward_keys=KEYS, gdpo_reward_weights=weights, norm_adv_by_std_in_grpo=False,
        )[0]
        for weights in (None, (1.0, 1.0), (2.0, 2.0))
    ]  # fmt: skip
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(("keys", "weights"), [(KEYS, (1.0,)), (("right",), None)])
def test_gdpo_needs_a_name_and_a_weight_for_each_component(
    keys: tuple[str, ...], weights: tuple[float, ...] | None
) -> None:
    with pytest.raises(ValueError, match="zip"):
        compute_gdpo(
            COMPONENTS, torch.ones(4, 1, dtype=torch.bool), ["a"] * 4,
            gdpo_reward_keys=keys, gdpo_reward_weights=weights, norm_adv_by_std_in_grpo=True,
        )  # fmt: skip


THOUGHTS = tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1, 1]]).bool()
ENTROPYS = tensor([[0.1, 0.3, 9.0], [9.0, 0.8, 1.2], [0.5, 9.0, 0.5], [0.5, 0.5, 0.5]])


def test_egpo_adds_entropy_bounded_by_the_advantage() -> None:
    """A = ∓√½, so the bonus is at most √½/2. H is 0.2, mean of 0.1 and 0.3, and 1, mean of 0.8 and 1.2, which
    is held at √½/2. The other group has A = 0, and nothing may be added."""
    advantages, _ = compute_egpo(
        REWARDS, MASK, ["a", "a", "b", "b"], ENTROPYS, THOUGHTS,
        norm_adv_by_std_in_grpo=True, egpo_lambda=0.4, egpo_alpha=2.0,
    )  # fmt: skip
    half = 1 / (2**0.5 + 1e-6)
    assert_close(advantages, tensor([-half + 0.4 * 0.2, half + 0.4 * half / 2, 0.0, 0.0])[:, None] * MASK)


def test_egpo_counts_no_thought_that_was_not_sampled() -> None:
    """Both rows: H over the one cell that is thought and sampled, 0.1 and 0.3; bounds of |A| = ½."""
    mask = tensor([[True, False], [True, False]])
    advantages, _ = compute_egpo(
        tensor([[0.0, 0.0], [1.0, 0.0]]), mask, ["a", "a"], tensor([[0.1, 9.0], [0.3, 9.0]]),
        torch.ones(2, 2, dtype=torch.bool), norm_adv_by_std_in_grpo=False, egpo_lambda=1.0, egpo_alpha=1.0,
    )  # fmt: skip
    assert_close(advantages, tensor([[-0.4, 0.0], [0.8, 0.0]]))


# --------------------------------------------------------------------------------- other baselines


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    """1 against (3 + 8)/2, 3 against (1 + 8)/2, 8 against (1 + 3)/2; one alone keeps its reward."""
    advantages, returns = compute_rloo(*outcomes(1, 3, 7, 8), ["a", "a", "b", "a"])
    assert_close(advantages[:, 0], tensor([-4.5, -1.5, 7.0, 6.0]))
    assert torch.equal(advantages, returns)


def test_opo_weighs_the_baseline_by_length() -> None:
    """Group a: (2·1 + 3·3)/5 = 2.2. Group b: 5 of 5; the observation in its first response is no length."""
    advantages, _ = compute_opo(REWARDS, MASK, ["a", "a", "b", "b"])
    assert_close(advantages, tensor([-1.2, 0.8, 0.0, 0.0])[:, None] * MASK)
    other = REWARDS.clone()
    other[2, 2] = 10.0  # (2·10 + 3·5)/5 = 7
    advantages, _ = compute_opo(other, MASK, ["a", "a", "b", "b"])
    assert_close(advantages[2:], tensor([3.0, -2.0])[:, None] * MASK[2:])


def test_opo_counts_a_response_without_a_token_as_nothing() -> None:
    """Lengths 1 and 0: the baseline is the first's reward, 4."""
    mask = tensor([[True], [False]])
    advantages, _ = compute_opo(tensor([[4.0], [0.0]]), mask, ["a", "a"])
    assert torch.equal(advantages, torch.zeros(2, 1))


def test_gpg_makes_up_for_all_but_one() -> None:
    """Three groups of one: a single response says something, so α = 3."""
    advantages, _ = compute_gpg(*outcomes(2, 0, 0), ["a", "b", "c"])
    assert_close(advantages[:, 0], tensor([6.0, 0.0, 0.0]))


def test_gpg_makes_up_for_responses_that_say_nothing() -> None:
    """r − μ is ½, −½, 0, 0: two of four say something, so α = 2. In the second step all but one pair does."""
    advantages, _ = compute_gpg(*outcomes(1, 0, 1, 1), ["a", "a", "b", "b"])
    assert_close(advantages[:, 0], tensor([1.0, -1.0, 0.0, 0.0]))
    advantages, _ = compute_gpg(*outcomes(1, 0, 1, 3), ["a", "a", "b", "b"])
    assert_close(advantages[:, 0], tensor([0.5, -0.5, -1.0, 1.0]))


def test_gpg_of_a_batch_that_says_nothing_is_zero() -> None:
    advantages, _ = compute_gpg(*outcomes(1, 1, 0, 0), ["a", "a", "b", "b"])
    assert torch.equal(advantages, torch.zeros(4, 1))


def test_reinforce_plus_plus_baseline_is_whitened_over_tokens() -> None:
    """r − μ = ∓½ on 1 and 3 tokens: mean ¼, variance (9/16 + 3/16)/3 = ¼, so 2·(−½ − ¼) and 2·(½ − ¼)."""
    mask = tensor([[1, 0, 0], [1, 1, 1]]).bool()
    advantages, _ = compute_reinforce_plus_plus_baseline(
        tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0]]), mask, ["a", "a"]
    )
    assert_close(advantages, tensor([[-1.5, 0.0, 0.0], [0.5, 0.5, 0.5]]))


def test_reinforce_plus_plus_baseline_subtracts_the_group_mean() -> None:
    """r − μ is −1, 1, −5, 5: mean 0, variance (1 + 1 + 25 + 25)/3."""
    advantages, _ = compute_reinforce_plus_plus_baseline(*outcomes(1, 3, 10, 20), ["a", "a", "b", "b"])
    assert_close(advantages[:, 0], tensor([-1.0, 1.0, -5.0, 5.0]) * math.sqrt(3 / 52))


def test_reinforce_plus_plus_whitens_discounted_returns_to_go() -> None:
    """Returns 1, 2, 4 and 2: mean 2.25, variance (1.5625 + 0.0625 + 3.0625 + 0.0625)/3 = 4.75/3."""
    mask = tensor([[1, 1, 1], [1, 0, 0]]).bool()
    advantages, returns = compute_reinforce_plus_plus(
        tensor([[0.0, 0.0, 4.0], [2.0, 0.0, 0.0]]), mask, gamma=0.5
    )
    assert_close(returns, tensor([[1.0, 2.0, 4.0], [2.0, 0.0, 0.0]]))
    scale = math.sqrt(3 / 4.75)
    assert_close(advantages, tensor([[-1.25, -0.25, 1.75], [-0.25, 0.0, 0.0]]) * scale * mask)


def test_reinforce_plus_plus_reaches_over_observations() -> None:
    """Sampled, observed twice, sampled: the first token is one step from the last, not three."""
    _, returns = compute_reinforce_plus_plus(
        tensor([[0.0, 7.0, 7.0, 4.0]]), tensor([[True, False, False, True]]), gamma=0.5
    )
    assert_close(returns, tensor([[2.0, 4.0, 4.0, 4.0]]))


def test_remax_subtracts_the_reward_of_the_greedy_answer() -> None:
    advantages, returns = compute_remax(
        tensor([[0.5, 0.0, 1.0], [0.0, 1.0, 0.0]]),
        tensor([[True, True, True], [True, True, False]]),
        tensor([0.7, -1.0]),
    )
    assert_close(returns, tensor([[1.5, 1.0, 1.0], [1.0, 1.0, 0.0]]))
    assert_close(advantages, tensor([[0.8, 0.3, 0.3], [2.0, 2.0, 0.0]]))


def test_remax_of_a_response_of_one_token() -> None:
    advantages, returns = compute_remax(*outcomes(1.5, 1.0), tensor([0.5, 2.0]))
    assert returns.tolist() == [[1.5], [1.0]]
    assert advantages.tolist() == [[1.0], [-1.0]]


def test_whitened_gae_has_returns_that_are_not() -> None:
    """γ = λ = 1 and no values: every token's advantage is the return, 1 and 3; variance (4·1)/3 = 4/3."""
    rewards = tensor([[0.0, 1.0], [0.0, 3.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages, returns = compute_whitened_gae(rewards, torch.zeros(2, 2), mask, gamma=1.0, lam=1.0)
    assert_close(advantages, tensor([[-1.0, -1.0], [1.0, 1.0]]) * math.sqrt(3 / 4))
    assert_close(returns, tensor([[1.0, 1.0], [3.0, 3.0]]))


# ------------------------------------------------------------------------- the optimal token baseline

# w = 1 − 2·½ + ½ = ½ for each token of the first row; 1 − 2·0.8 + 0.68 = 0.08, then ½, for the second
LOG_PROBS = tensor([[0.5, 0.5, 0.5], [0.8, 0.5, 0.5]]).log()
SQUARES = tensor([[0.5, 0.5, 0.5], [0.68, 0.5, 0.5]])
EARNED = tensor([[0.0, 1.0, 2.0], [0.5, 0.0, 0.0]])
LENGTHS = tensor([[True, True, True], [True, True, False]])


def test_optimal_token_baseline_weighs_by_uncertainty_so_far() -> None:
    """W = ½, 1 and 0.08, 0.58; G = 3, 3, 2 and ½, 0. The third token stands alone and keeps its return."""
    advantages, returns = compute_optimal_token_baseline(EARNED, LENGTHS, ["a", "a"], LOG_PROBS, SQUARES)
    first, second = (0.5 * 3 + 0.08 * 0.5) / 0.58, 1 * 3 / 1.58
    assert_close(returns, tensor([[3.0, 3.0, 2.0], [0.5, 0.0, 0.0]]))
    assert_close(advantages, tensor([[3 - first, 3 - second, 2.0], [0.5 - first, -second, 0.0]]))


def test_optimal_token_baseline_ignores_ended_responses() -> None:
    """A third response of w = ½: at the third token W = 1.5 and 1.5, G = 2 and 1 of first and third; the second
    has ended, and its W of 0.58 would make the baseline (3 + 1.5)/(3 + 0.58)."""
    third = tensor([[0.0, 0.0, 1.0]])
    advantages, _ = compute_optimal_token_baseline(
        torch.cat([EARNED, third]),
        torch.cat([LENGTHS, torch.ones(1, 3, dtype=torch.bool)]),
        ["a"] * 3,
        torch.cat([LOG_PROBS, LOG_PROBS[:1]]),
        torch.cat([SQUARES, SQUARES[:1]]),
    )
    assert_close(advantages[:, 2], tensor([0.5, 0.0, -0.5]))


def test_the_optimal_token_baseline_of_one_is_its_return() -> None:
    advantages, returns = compute_optimal_token_baseline(EARNED, LENGTHS, ["a", "b"], LOG_PROBS, SQUARES)
    assert torch.equal(advantages, returns)


def test_optimal_token_baseline_follows_the_loss_weights() -> None:
    """The first row's first token counts 2: w = ½·2² = 2, so W = 2, 2.5 beside 0.08, 0.58."""
    weights = tensor([[2.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    advantages, _ = compute_optimal_token_baseline(
        EARNED, LENGTHS, ["a", "a"], LOG_PROBS, SQUARES, rollout_is_weights=weights
    )
    first, second = (2 * 3 + 0.08 * 0.5) / 2.08, 2.5 * 3 / 3.08
    assert_close(advantages, tensor([[3 - first, 3 - second, 2.0], [0.5 - first, -second, 0.0]]))


def test_the_optimal_token_baseline_of_a_certain_policy_is_zero() -> None:
    """π = 1 and Σπ² = 1: no gradient, no weight, and 0/0 is no number."""
    advantages, returns = compute_optimal_token_baseline(
        EARNED, LENGTHS, ["a", "a"], torch.zeros(2, 3), torch.ones(2, 3)
    )
    assert torch.equal(advantages, returns)


# ------------------------------------------------------------------------------------ groups of one


@pytest.mark.parametrize("by_std", [True, False])
def test_a_group_of_one_keeps_its_reward(by_std: bool) -> None:
    uid = ["a", "b", "c", "d"]
    kept = tensor([1.0, 3.0, 5.0, 5.0])[:, None] * MASK
    assert_close(compute_grpo(REWARDS, MASK, uid, norm_adv_by_std_in_grpo=by_std)[0], kept)
    assert_close(compute_rloo(REWARDS, MASK, uid)[0], kept)
    assert_close(compute_opo(REWARDS, MASK, uid)[0], kept)
    assert_close(compute_gpg(REWARDS, MASK, uid)[0], kept)


def test_reinforce_plus_plus_baseline_of_lone_rows_is_the_batchs() -> None:
    """1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9)/3 = 20/3."""
    advantages, _ = compute_reinforce_plus_plus_baseline(*outcomes(1, 3, 5, 7), ["a", "b", "c", "d"])
    assert_close(advantages[:, 0], tensor([-3.0, -1.0, 1.0, 3.0]) * math.sqrt(3 / 20))


def test_a_uid_for_each_row_is_needed() -> None:
    with pytest.raises(ValueError, match="expected one uid for each row; got 3 uids for 4 rows"):
        compute_rloo(REWARDS, MASK, np.array(["a"] * 3, dtype=object).tolist())


def test_uids_of_several_types_are_distinguished_by_their_text() -> None:
    uid: list[Any] = [7, "a", 7, "a"]
    assert torch.equal(
        compute_rloo(REWARDS, MASK, uid)[0], compute_rloo(REWARDS, MASK, ["7", "a", "7", "a"])[0]
    )
