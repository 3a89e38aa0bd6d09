"""Policy losses by hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.aggregation import Aggregation, BatchCounts
from rolemesh.algos.policy_loss import (
    TokenLosses,
    bypass_policy_loss,
    cispo_policy_loss,
    clip_cov_policy_loss,
    dppo_kl_policy_loss,
    dppo_tv_policy_loss,
    dro_policy_loss,
    geo_mean_policy_loss,
    gpg_policy_loss,
    gspo_policy_loss,
    kl_cov_policy_loss,
    sapo_policy_loss,
    scale_losses,
    vanilla_policy_loss,
)
from rolemesh.catalog.catalog import load
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.config.actor import ActorConfig, PolicyLossConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.config.rollout_correction import RolloutCorrectionConfig
from rolemesh.errors import InvalidConfig
from tests.support.rows.losses import CONFIG, TOKEN_LOSSES, options_of

LN2 = math.log(2)


class Case:
    """Tokens with the probabilities new and old, [b, T], in float64."""

    def __init__(self, new: Any, old: Any, advantages: Any, mask: Any = None) -> None:
        self.log_probs = tensor(new, dtype=torch.float64).log().requires_grad_()
        self.old_log_probs = tensor(old, dtype=torch.float64).log()
        self.advantages = tensor(advantages, dtype=torch.float64)
        self.mask = torch.ones_like(self.advantages, dtype=torch.bool) if mask is None else tensor(mask)

    def __call__(
        self, loss: Callable[..., TokenLosses], config: ActorConfig = CONFIG, **besides: Any
    ) -> TokenLosses:
        """The losses; their sum's gradient is then in `gradient`."""
        besides |= options_of(loss, config)
        result = loss(self.log_probs, self.old_log_probs, self.advantages, self.mask, **besides)
        (self.gradient,) = torch.autograd.grad(result.losses.sum(), self.log_probs)
        return result


def of(*values: float) -> Tensor:
    return tensor([values], dtype=torch.float64)


def test_vanilla_is_the_clipped_surrogate_with_the_dual_clip() -> None:
    """free; held at 1.3; free; free, the worse; held at 0.8; dual clip: 3·2 and not 4·2."""
    ratio = [1.0, 1.5, 0.5, 1.5, 0.5, 4.0]
    case = Case([[0.1 * r for r in ratio]], [[0.1] * 6], [[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
    result = case(vanilla_policy_loss)
    assert_close(result.losses, of(-2.0, -2.6, -1.0, 3.0, 1.6, 6.0))
    assert_close(case.gradient, of(-2.0, 0.0, -1.0, 3.0, 0.0, 0.0))
    assert_close(result.shares["pg_clipfrac"], of(0.0, 1.0, 0.0, 0.0, 1.0, 0.0))
    assert_close(result.shares["pg_clipfrac_lower"], of(0.0, 0.0, 0.0, 0.0, 0.0, 1.0))
    assert_close(result.shares["ppo_kl"], -of(*ratio).log())


def test_a_small_advantage_above_0_has_no_dual_clip() -> None:
    """ρ = 4 is held at 1.3; the dual clip's bound would be 3·½."""
    case = Case([[0.4]], [[0.1]], [[0.5]])
    result = case(vanilla_policy_loss)
    assert_close(result.losses, of(-0.65))
    assert_close(result.shares["pg_clipfrac_lower"], of(0.0))


def test_gpg_is_the_log_probability_times_the_advantage() -> None:
    case = Case([[0.5, 0.25]], [[0.9, 0.1]], [[2.0, -3.0]])
    result = case(gpg_policy_loss)
    assert_close(result.losses, of(2 * LN2, -6 * LN2))
    assert_close(case.gradient, of(-2.0, 3.0))


def test_gspo_has_sequence_ratio_values_and_token_gradients() -> None:
    """Ratios 4 and 1: s = 2. With A = 1 held at 1.3; with A = -1 free, and no dual clip. Ratios 1.21 and 1:
    s = 1.1, and each token's gradient is -A·s, not a half of it. What is masked is not in the mean."""
    new = [[0.4, 0.1, 0.9], [0.4, 0.1, 0.9], [0.121, 0.1, 0.9]]
    mask = [[True, True, False]] * 3
    advantages = [[1.0] * 3, [-1.0] * 3, [2.0] * 3]
    case = Case(new, [[0.1] * 3] * 3, advantages, mask)
    result = case(gspo_policy_loss)
    expected = tensor([[-1.3, -1.3], [2.0, 2.0], [-2.2, -2.2]], dtype=torch.float64)
    assert_close(result.losses[:, :2], expected)
    assert_close(case.gradient[:, :2], tensor([[0.0, 0.0], [2.0, 2.0], [-2.2, -2.2]], dtype=torch.float64))
    assert_close(result.shares["pg_clipfrac"][:, 0], tensor([1.0, 0.0, 0.0], dtype=torch.float64))
    assert_close(result.shares["ppo_kl"][:, 0], -tensor([4.0, 4.0, 1.21], dtype=torch.float64).log())
    far = Case([[1.0]], [[math.exp(-15)]], [[-1.0]])
    assert far(gspo_policy_loss).losses.item() == pytest.approx(math.exp(10))


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    case = Case([[0.3, 0.1, 0.22]], [[0.2, 0.2, 0.2]], [[2.0, -1.0, 1.0]])
    result = case(cispo_policy_loss)
    weights = (1.3, 0.8, 1.1)
    assert_close(result.losses, of(-1.3 * 2 * math.log(0.3), 0.8 * math.log(0.1), -1.1 * math.log(0.22)))
    assert_close(case.gradient, of(-2 * weights[0], weights[1], -weights[2]))
    assert_close(result.shares["pg_clipfrac"], of(1.0, 1.0, 0.0))


def test_cispo_with_clip_ratio_low_10_clips_nothing_from_below() -> None:
    config = ActorConfig(
        clip_ratio_low=10, clip_ratio_high=0.3, policy_loss=PolicyLossConfig(loss_mode="cispo")
    )
    case = Case([[0.1]], [[0.5]], [[1.0]])
    case(cispo_policy_loss, config)
    assert_close(case.gradient, of(-0.2))


def test_sapos_gate_is_four_over_tau_times_a_sigmoid() -> None:
    """At ρ = 1 the gate is 2/τ and its slope 1; at ρ = 2 it is 4·sigmoid(τ)/τ."""
    case = Case([[0.1, 0.1, 0.2, 0.2]], [[0.1, 0.1, 0.1, 0.1]], [[1.0, -1.0, 1.0, -2.0]])
    result = case(sapo_policy_loss)
    up, down = 4 / (1 + math.exp(-1)), 4 / 1.05 / (1 + math.exp(-1.05))
    assert_close(result.losses, of(-2.0, 2 / 1.05, -up, 2 * down))
    slope_up, slope_down = up * (1 - up / 4), 1.05 * down * (1 - 1.05 * down / 4)  # τ·gate·(1 − sigmoid)
    assert_close(case.gradient, of(-1.0, 1.0, -2 * slope_up, 2 * 2 * slope_down))


def test_clip_cov_drops_chosen_tokens_and_has_no_dual_clip() -> None:
    case = Case([[0.1, 0.4, 0.15, 0.1]], [[0.1, 0.1, 0.1, 0.1]], [[2.0, -2.0, 1.0, 5.0]])
    result = case(clip_cov_policy_loss, chosen=tensor([[False, False, False, True]]))
    assert_close(result.losses, of(-2.0, 8.0, -1.3, 0.0))
    assert_close(case.gradient, of(-2.0, 8.0, 0.0, 0.0))
    assert_close(result.shares["pg_clipfrac"], of(0.0, 0.0, 0.0, 1.0))


def test_kl_cov_adds_a_kl_to_the_chosen_tokens_and_clips_nothing() -> None:
    case = Case([[0.2, 0.2, 0.05]], [[0.1, 0.1, 0.1]], [[1.0, 1.0, 4.0]])
    result = case(kl_cov_policy_loss, chosen=tensor([[False, True, True]]))
    assert_close(result.losses, of(-2.0, -2 + 0.1 * LN2, -2 + 0.1 * LN2))
    assert_close(case.gradient, of(-2.0, -2.0 + 0.1, -2.0 - 0.1))
    assert_close(result.shares["ppo_kl"], of(LN2, LN2, LN2))


def test_sapo_and_geo_mean_have_an_aggregation_of_their_own() -> None:
    own = {name: POLICY_LOSSES[name].aggregation for name in TOKEN_LOSSES if POLICY_LOSSES[name].aggregation}
    assert own == {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}


def test_geo_mean_clips_log_ratios_and_weighs_rows_by_their_mean() -> None:
    """log ρ (0.5, -0.1) with A = 1: 0.5 is held at 0.3, mean 0.1. (0.5, -0.5) with A = -2: -0.5 is held at
    -0.2, mean 0.15. The third row has no token."""
    log_ratio = [[0.5, -0.1, 3.0], [0.5, -0.5, 3.0], [0.5, 0.5, 3.0]]
    new = [[0.1 * math.exp(d) for d in row] for row in log_ratio]
    mask = [[True, True, False], [True, True, False], [False, False, False]]
    case = Case(new, [[0.1] * 3] * 3, [[1.0] * 3, [-2.0] * 3, [1.0] * 3], mask)
    result = case(geo_mean_policy_loss)
    first, second = math.exp(0.1), math.exp(0.15)
    aggregate = Aggregation.of(BatchCounts.of(case.mask), POLICY_LOSSES["geo_mean"].aggregation or "")
    loss = aggregate(result.losses, case.mask)
    assert loss.item() == pytest.approx((-first + 2 * second) / 3)
    (gradient,) = torch.autograd.grad(
        aggregate(case_losses(case, geo_mean_policy_loss), case.mask), case.log_probs
    )
    expected = tensor([[0.0, -first / 2, 0], [2 * second / 2, 0, 0], [0, 0, 0]], dtype=torch.float64) / 3
    assert_close(gradient, expected)
    assert_close(result.shares["pg_clipfrac"][:2, :2], tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    assert_close(
        result.shares["pg_clipfrac_lower"][:2, :2], tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    )


def test_a_clipped_geo_mean_token_counts_by_its_advantage_sign() -> None:
    """log ρ = 0.5 on each; where A = 0 it counts on neither side."""
    case = Case([[0.1 * math.exp(0.5)] * 3], [[0.1] * 3], [[0.5, 0.0, -0.5]])
    shares = case(geo_mean_policy_loss).shares
    assert_close(shares["pg_clipfrac"], of(1.0, 0.0, 0.0))
    assert_close(shares["pg_clipfrac_lower"], of(0.0, 0.0, 1.0))


def case_losses(case: Case, loss: Callable[..., TokenLosses]) -> Tensor:
    options = options_of(loss, CONFIG)
    return loss(case.log_probs, case.old_log_probs, case.advantages, case.mask, **options).losses


def test_a_geo_mean_rows_weight_is_its_tokens_geometric_mean() -> None:
    weights, mask = tensor([[4.0, 1.0, 9.0], [2.0, 0.5, 9.0]]), tensor([[True, True, False]] * 2)
    losses = torch.ones(2, 3)
    assert [name for name, loss in POLICY_LOSSES.items() if loss.row_weights] == ["geo_mean"]
    by_row = scale_losses(losses, weights, mask, by_row=True)
    assert_close(by_row, tensor([[2.0], [1.0]]).expand(2, 3))
    assert torch.equal(scale_losses(losses, weights, mask, by_row=False), weights)
    nothing = tensor([[1.0, 0.0, 9.0]])  # 1e-10 stands in for 0
    scaled = scale_losses(losses[:1], nothing, mask[:1], by_row=True)
    assert scaled[0, 0].item() == pytest.approx(1e-5, rel=1e-4)


DIVERGENCE = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.2)


def test_dppo_tv_masks_what_has_moved_too_far_the_advantages_way() -> None:
    """Moves +0.1 and +0.3 with A > 0, +0.3 and -0.15 with A < 0; then a ratio of 5, which counts as 3."""
    case = Case([[0.5, 0.7, 0.7, 0.3, 0.05]], [[0.4, 0.4, 0.4, 0.45, 0.01]], [[1.0, 1.0, -1.0, -1.0, 2.0]])
    result = case(dppo_tv_policy_loss, DIVERGENCE)
    assert_close(result.losses, of(-1.25 * math.log(0.5), 0.0, 1.75 * math.log(0.7), 0.0, -6 * math.log(0.05)))
    assert_close(case.gradient, of(-1.25, 0.0, 1.75, 0.0, -6.0))
    assert_close(result.shares["pg_clipfrac"], of(0.0, 1.0, 0.0, 1.0, 0.0))
    assert_close(result.shares["pg_clipfrac_lower"], of(0.0, 0.0, 0.0, 0.0, 1.0))


def test_dppo_tv_allows_its_bound_and_small_moves_either_way() -> None:
    """Moves of +½ and −½ where ½ is allowed; then −0.05 with A < 0 where 0.1 is; then +0.3 with A = 0, to which
    the lower bound alone applies."""
    edge = Case([[1.0, 0.5]], [[0.5, 1.0]], [[1.0, -1.0]])
    assert_close(edge(dppo_tv_policy_loss, ActorConfig(clip_ratio=0.5)).shares["pg_clipfrac"], of(0.0, 0.0))
    near = Case([[0.35, 0.7]], [[0.4, 0.4]], [[-1.0, 0.0]])
    assert_close(near(dppo_tv_policy_loss, DIVERGENCE).shares["pg_clipfrac"], of(0.0, 0.0))
    assert_close(near.gradient, of(0.875, 0.0))


def test_dppo_kl_of_a_token_that_was_or_is_certain_is_a_number() -> None:
    """From 1 to 0.9 it is ln(1/0.9) = 0.105. From 0.9 to 1 it is 0.9·ln 0.9 + 0.1·ln(0.1/1e-8) = 1.517."""
    certain = Case([[0.9, 1.0]], [[1.0, 0.9]], [[-1.0, 1.0]])
    for allowed, clipped in ((0.10, (1.0, 1.0)), (0.11, (0.0, 1.0)), (1.51, (0.0, 1.0)), (1.52, (0.0, 0.0))):
        config = ActorConfig(clip_ratio=allowed, policy_loss=PolicyLossConfig(loss_mode="dppo_kl"))
        assert_close(certain(dppo_kl_policy_loss, config).shares["pg_clipfrac"], of(*clipped))


def test_dppo_kl_masks_no_move_up_without_an_advantage() -> None:
    still = Case([[0.6]], [[0.5]], [[0.0]])
    assert_close(still(dppo_kl_policy_loss, ActorConfig(clip_ratio=0.01)).shares["pg_clipfrac"], of(0.0))


def test_dppo_kl_masks_by_the_divergence_of_a_token_or_the_rest() -> None:
    """From 0.5 to 0.6, and to 0.4, it is ½ ln(0.25/0.24) = 0.0204; to 0.55 it is ½ ln(0.25/0.2475) = 0.0050."""
    new, advantages = [[0.6, 0.6, 0.4, 0.4, 0.55]], [[1.0, -1.0, 1.0, -1.0, 1.0]]
    for allowed, kept in ((0.0203, [0, 1, 1, 0, 1]), (0.0205, [1, 1, 1, 1, 1]), (0.0049, [0, 1, 1, 0, 0])):
        case = Case(new, [[0.5] * 5], advantages)
        result = case(dppo_kl_policy_loss, ActorConfig(clip_ratio=allowed))
        gradient = of(-1.2, 1.2, -0.8, 0.8, -1.1) * tensor(kept)
        assert_close(case.gradient, gradient)
        assert_close(result.losses, gradient * case.log_probs.detach())
        assert_close(result.shares["pg_clipfrac"], 1 - of(*kept))


def test_dro_pays_half_beta_times_the_squared_log_ratio() -> None:
    case = Case([[0.4, 0.1]], [[0.2, 0.2]], [[3.0, -1.0]])
    result = case(dro_policy_loss)
    assert_close(result.losses, of(-3 * math.log(0.4) + 0.05 * LN2**2, math.log(0.1) + 0.05 * LN2**2))
    assert_close(case.gradient, of(-3 + 0.1 * LN2, 1 - 0.1 * LN2))


def test_bypass_with_ppo_clip_is_vanilla_against_the_engine() -> None:
    case = Case([[0.15, 0.4]], [[0.1, 0.1]], [[2.0, -2.0]])
    result = case(bypass_policy_loss, correction=RolloutCorrectionConfig(bypass_mode=True))
    assert_close(result.losses, of(-2.6, 6.0))
    assert_close(case.gradient, of(0.0, 0.0))


@pytest.mark.parametrize(
    ("rollout_is", "threshold", "weights"),
    [
        (None, 2.0, (1.0, 1.0, 1.0)),
        ("token", 2.0, (1.5, 2.0, 0.5)),
        ("token", "0.6_3.0", (1.5, 0.0, 0.0)),
        ("sequence", 10.0, (3.0, 3.0, 3.0)),
    ],
)
def test_bypass_with_reinforce_weighs_by_a_detached_factor(
    rollout_is: Any, threshold: Any, weights: tuple[float, ...]
) -> None:
    """Ratios 1.5, 4 and 0.5."""
    correction = RolloutCorrectionConfig(
        bypass_mode=True, loss_type="reinforce", rollout_is=rollout_is, rollout_is_threshold=threshold
    )
    case = Case([[0.15, 0.4, 0.05]], [[0.1, 0.1, 0.1]], [[2.0, -1.0, 1.0]])
    result = case(bypass_policy_loss, correction=correction)
    expected = of(*weights) * of(-2.0, 1.0, -1.0)
    assert_close(case.gradient, expected)
    assert_close(result.losses, expected * case.log_probs.detach())


def test_bypass_rejects_by_the_policy_under_training() -> None:
    correction = RolloutCorrectionConfig(bypass_mode=True, rollout_rs="token_k1", rollout_rs_threshold=2.0)
    case = Case([[0.15, 0.4, 0.04]], [[0.1, 0.1, 0.1]], [[1.0, 1.0, 1.0]])
    result = case(bypass_policy_loss, correction=correction)
    assert result.accepted is not None
    assert result.accepted.tolist() == [[True, False, False]]


# ------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_the_catalog_says_what_each_loss_takes(name: str) -> None:
    loss = POLICY_LOSSES[name]
    parameters = inspect.signature(loss.load()).parameters.values()
    besides = {"chosen": loss.choose is not None, "correction": loss.corrects}
    expected = {*loss.keys, *(key for key, holds in besides.items() if holds)}
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == expected
    assert CONFIG.values_of(loss.keys).keys() == set(loss.keys)
    if loss.choose is not None:
        chooser = inspect.signature(load(loss.choose)).parameters.values()
        assert {p.name for p in chooser if p.kind is p.KEYWORD_ONLY} == set(loss.choose_keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy_loss": {"loss_mode": "gpso"}}, "'gspo'"),
        ({"clip_ratio_low": 1.0}, "lower clip range is 1 .*loss_mode vanilla"),
        ({"clip_ratio": 3.0, "policy_loss": {"loss_mode": "gspo"}}, "lower clip range is 3 .*loss_mode gspo"),
        ({"policy_loss": {"clip_cov_lb": 5.0}}, "clip_cov_lb 5 is not below clip_cov_ub 5"),
        ({"policy_loss": {"clip_cov_ratio": 0}}, "clip_cov_ratio"),
        ({"policy_loss": {"kl_cov_ratio": 1.5}}, "kl_cov_ratio"),
        ({"policy_loss": {"dro_beta": 0}}, "dro_beta"),
        ({"policy_loss": {"loss_mode": "dro"}}, "loss_mode is dro, but dro_beta is not set"),
        ({"tau_neg": 0}, "tau_neg"),
        ({"clip_ratio_c": math.inf}, "'actor.clip_ratio_c' is inf"),
    ],
)
def test_ranges_of_no_loss_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make_job({"actor": keys})


def test_later_passes_need_a_ratio_unless_the_rows_are_given() -> None:
    bypass = {"bypass_mode": True}
    unweighted = bypass | {"loss_type": "reinforce"}
    for loss_mode, correction, of in (
        ("gpg", {}, "loss_mode gpg"),
        ("vanilla", unweighted, "loss_type reinforce without rollout_is"),
        ("bypass", unweighted, "loss_type reinforce without rollout_is"),
    ):
        job = {
            "actor": {"policy_loss": {"loss_mode": loss_mode}, "ppo_epochs": 2},
            "algorithm": {"rollout_correction": correction},
        }
        with pytest.raises(InvalidConfig, match=f"actor.ppo_epochs is 2, but {of} has no ratio"):
            make_job(job)
        make_job(merge(job, {"actor": {"ppo_epochs": 1}}))
    for section in (
        {"page": "sft"},
        {"page": "dpo"},
        {"rollout_correction": bypass},
        {"rollout_correction": unweighted | {"rollout_is": "token"}},
    ):
        make_job({"actor": {"ppo_epochs": 2}, "algorithm": section})


@pytest.mark.parametrize("loss_mode", ["cispo", "geo_mean", "dppo_kl"])
def test_ranges_that_are_of_no_ratio_may_be_wide(loss_mode: str) -> None:
    assert ActorConfig(clip_ratio=10, policy_loss=PolicyLossConfig.model_validate({"loss_mode": loss_mode}))
