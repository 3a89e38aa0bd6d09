"""Importance weights between engine and trainer by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mismatch import MASK, OLD, ROLLOUT
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.rollout_correction import (
    accepted_tokens,
    bounded,
    correct,
    importance_weights,
    mismatch_metrics,
    normalised,
    spread,
)
from rolemesh.config.rollout_correction import RolloutCorrectionConfig


def test_a_tokens_weight_is_old_over_rollout_probability() -> None:
    weights = importance_weights(OLD, ROLLOUT, MASK, level="token")
    assert_close(weights, tensor([[0.5, 3.0, 4.0], [0.2, 0.0, 0.0]]))
    assert_close(bounded(weights, None, 2.0), tensor([[0.5, 2.0, 2.0], [0.2, 0.0, 0.0]]))


def test_a_sequence_weight_is_the_product_and_is_on_every_token() -> None:
    weights = importance_weights(OLD, ROLLOUT, MASK, level="sequence")
    assert_close(weights, tensor([[6.0, 6.0, 6.0], [0.2, 0.0, 0.0]]))
    assert_close(bounded(weights, None, 5.0), tensor([[5.0, 5.0, 5.0], [0.2, 0.0, 0.0]]))


def test_icepop_leaves_what_lies_between_and_zeroes_the_rest() -> None:
    weights = importance_weights(OLD, ROLLOUT, MASK, level="token")
    assert_close(bounded(weights, 0.4, 3.5), tensor([[0.5, 3.0, 0.0], [0.0, 0.0, 0.0]]))
    bounds = tensor([[0.5, 1.0, 5.0]])
    assert torch.equal(bounded(bounds, 0.5, 5.0), bounds)  # between them, they included


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_log_weights_are_held_at_20(level: str) -> None:
    far, mask = tensor([[90.0]]), tensor([[True]])
    zero = torch.zeros(1, 1)
    assert_close(importance_weights(far, zero, mask, level=level), tensor([[math.exp(20)]]))  # type: ignore[arg-type]
    least = importance_weights(-far, zero, mask, level=level)  # type: ignore[arg-type]
    assert least.item() == pytest.approx(math.exp(-20))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_gradient_flows_through_the_weights(level: str) -> None:
    old = OLD.clone().requires_grad_()
    assert not importance_weights(old, ROLLOUT, MASK, level=level).requires_grad  # type: ignore[arg-type]


def test_kl_perplexities_and_chi2_are_those_worked_by_hand() -> None:
    """Ratios 1/2, 3, 4, 1/5: their product is 6/5; k3 is Σ(ratio − 1) − ln(6/5) = 3.7 − ln(6/5). χ² is of their
    squares, and of 6² and 1/25 for rows. The trainer's probabilities are 0.1, 0.6, 0.8 and 0.1; the engine's
    0.2, 0.2, 0.2 and 0.5."""
    metrics = mismatch_metrics(OLD, ROLLOUT, MASK)
    trainer, engine = (0.1 * 0.6 * 0.8) ** (-1 / 3), 0.2**-1
    expected = {
        "kl": -math.log(1.2) / 4,
        "k3_kl": (3.7 - math.log(1.2)) / 4,
        "training_ppl": (trainer + 10) / 2,
        "rollout_ppl": (engine + 2) / 2,
        "training_log_ppl": (math.log(trainer) + math.log(10)) / 2,
        "rollout_log_ppl": (math.log(engine) + math.log(2)) / 2,
        "log_ppl_diff": (math.log(trainer / engine) + math.log(5)) / 2,
        "log_ppl_abs_diff": (math.log(engine / trainer) + math.log(5)) / 2,
        "log_ppl_diff_max": math.log(5),
        "log_ppl_diff_min": math.log(trainer / engine),
        "ppl_ratio": (trainer / engine + 5) / 2,
        "chi2_token": (0.25 + 9 + 16 + 0.04) / 4 - 1,
        "chi2_seq": (36 + 0.04) / 2 - 1,
    }
    assert metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("d", "k3", "chi2"),
    [(90.0, math.expm1(20) - 20, math.expm1(40)), (-90.0, math.expm1(-20) + 20, -1.0)],
)
def test_metrics_exponential_in_the_mismatch_clamp_it_at_20(d: float, k3: float, chi2: float) -> None:
    metrics = mismatch_metrics(tensor([[d]]), torch.zeros(1, 1), tensor([[True]]))
    found = [metrics[name] for name in ("kl", "k3_kl", "chi2_token", "chi2_seq")]
    assert found == pytest.approx([-d, k3, chi2, chi2], rel=1e-5)


def test_perplexities_are_not_clamped() -> None:
    """A response of one token with log-probability −60, which the engine was sure of."""
    metrics = mismatch_metrics(tensor([[-60.0]]), torch.zeros(1, 1), tensor([[True]]))
    names = ("training_log_ppl", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min")
    assert [metrics[name] for name in names] == [60.0] * 5
    assert [metrics["training_ppl"], metrics["ppl_ratio"]] == pytest.approx([math.exp(60)] * 2, rel=1e-5)


@pytest.mark.parametrize("d", [90.0, -90.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_rejection_clamps_the_log_ratio_at_20(d: float, estimator: str) -> None:
    """k1 of ±20 is ∓20, k2 is 200, k3 is e^±20 − 1 ∓ 20. A response of two tokens has twice as much."""
    held = math.copysign(20, d)
    wanted = {"k1": -held, "k2": 200.0, "k3": math.expm1(held) - held}[estimator]
    for over, times in (("token", 1), ("seq_sum", 2), ("seq_mean", 1)):
        config = RolloutCorrectionConfig(rollout_rs=f"{over}_{estimator}", rollout_rs_threshold=2.0)
        zeros = torch.zeros(1, 2)
        metrics = correct(zeros + d, zeros, zeros == 0, config).metrics
        assert metrics[f"rollout_corr/rollout_rs_{over}_{estimator}_mean"] == pytest.approx(
            times * wanted, rel=1e-5
        )


def test_between_equal_policies_there_is_no_mismatch() -> None:
    same = mismatch_metrics(OLD, OLD, MASK)
    assert same.pop("training_ppl") == same.pop("rollout_ppl") > 1
    assert same.pop("training_log_ppl") == same.pop("rollout_log_ppl") > 0
    assert same.pop("ppl_ratio") == 1
    assert set(same.values()) == {0.0}
    equal = {"mean": 1.0, "min": 1.0, "max": 1.0, "std": 0.0, "eff_sample_size": 1.0}
    assert spread(importance_weights(OLD, OLD, MASK, level="token"), MASK) == equal


def test_effective_sample_size_is_squared_sum_over_square_sum() -> None:
    """Of 1, 3, 1, 3: mean 2, deviation 1, effective sample size 8²/(4·20)."""
    assert spread(tensor([[1.0, 3.0, 1.0], [3.0, 9.0, 9.0]]), MASK) == pytest.approx(
        {"mean": 2.0, "min": 1.0, "max": 3.0, "std": 1.0, "eff_sample_size": 0.8}
    )


def test_a_single_dominant_weight_has_effective_sample_size_one() -> None:
    assert spread(tensor([[1e9, 0.0, 0.0], [0.0, 0.0, 0.0]]), MASK)["eff_sample_size"] == pytest.approx(1 / 4)
    assert spread(torch.zeros(2, 3), MASK)["eff_sample_size"] == 0  # IcePop may leave nothing


# Of the weights 1/2, 3, 4 and 1/5 as they are.
RAW = {"mean": 7.7 / 4, "min": 0.2, "max": 4.0, "eff_sample_size": 7.7**2 / (4 * (0.25 + 9 + 16 + 0.04))}


def reported(stem: str, **keys: Any) -> dict[str, float]:
    """The metrics of a correction that begin with a stem, by what follows it."""
    metrics = correct(OLD, ROLLOUT, MASK, RolloutCorrectionConfig(**keys)).metrics
    stem = f"rollout_corr/{stem}_"
    return {name.removeprefix(stem): value for name, value in metrics.items() if name.startswith(stem)}


def test_loss_weights_are_reported_and_raw_ones_named_apart() -> None:
    """Cut at 2: 1/2, 2, 2, 1/5; mean 4.7/4, mean square 8.29/4."""
    cut = reported("rollout_is", rollout_is="token")
    assert {name: cut[name] for name in ("mean", "min", "max")} == pytest.approx(
        {"mean": 4.7 / 4, "min": 0.2, "max": 2.0}
    )
    assert cut["std"] == pytest.approx(math.sqrt(8.29 / 4 - (4.7 / 4) ** 2))
    assert cut["eff_sample_size"] == pytest.approx(4.7**2 / (4 * 8.29))
    raw = reported("rollout_is_raw", rollout_is="token")
    assert {name: raw[name] for name in RAW} == pytest.approx(RAW)
    assert "oob_ratio" not in cut


def test_without_weights_in_the_loss_only_raw_ones_are_reported() -> None:
    raw = reported("rollout_is_raw")
    assert {name: raw[name] for name in RAW} == pytest.approx(RAW)
    assert set(reported("rollout_is")) == {f"raw_{name}" for name in raw}


def test_extreme_weights_of_a_response_are_reported_unclipped() -> None:
    """6 on three tokens and 1/5 on one, cut at 2: mean (2 + 2 + 2 + 1/5)/4."""
    cut = reported("rollout_is", rollout_is="sequence")
    assert cut["mean"] == pytest.approx(6.2 / 4)
    assert cut["std"] == pytest.approx(math.sqrt(12.04 / 4 - (6.2 / 4) ** 2), rel=1e-5)
    assert (cut["min"], cut["max"]) == pytest.approx((0.2, 6.0))


def test_icepop_reports_the_share_of_tokens_beyond_its_bounds() -> None:
    """Between 0.4 and 3.5 lie 1/2 and 3."""
    within = reported("rollout_is", rollout_is="token", rollout_is_threshold="0.4_3.5")
    assert within["oob_ratio"] == 0.5
    assert (within["mean"], within["min"], within["max"]) == pytest.approx((3.5 / 4, 0.0, 3.0))
    row = reported("rollout_is", rollout_is="sequence", rollout_is_threshold="0.4_7")
    assert row["oob_ratio"] == 0.25  # 1/5
    assert (row["min"], row["max"]) == pytest.approx((0.2, 6.0))
    for at_a_bound in ("1_2", "0.5_1"):
        config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=at_a_bound)
        assert correct(OLD, OLD, MASK, config).metrics["rollout_corr/rollout_is_oob_ratio"] == 0


@pytest.mark.parametrize(("level", "mean"), [("token", (0.5 + 2 + 2 + 0.2) / 4), ("sequence", (2 + 0.2) / 2)])
def test_weights_are_normalised_by_their_mean_and_reported_raw(level: str, mean: float) -> None:
    """The mean is over sampled tokens."""
    keys: dict[str, Any] = {"rollout_is": level}
    as_it_is = correct(OLD, ROLLOUT, MASK, RolloutCorrectionConfig(**keys))
    over_mean = correct(OLD, ROLLOUT, MASK, RolloutCorrectionConfig(**keys, rollout_is_batch_normalize=True))
    assert as_it_is.weights is not None
    assert over_mean.weights is not None
    assert_close(over_mean.weights, as_it_is.weights / mean)
    assert over_mean.metrics.pop("rollout_corr/rollout_is_batch_norm_factor") == pytest.approx(mean)
    assert over_mean.metrics == as_it_is.metrics


def test_a_sequence_weight_is_found_whichever_tokens_are_masked() -> None:
    """Weights 6 and 1/5; the first token of one row and the last of the other are not the policy's."""
    mask = tensor([[False, True, True], [True, True, False], [False, False, False]])
    weights = torch.where(mask, tensor([[6.0], [0.2], [9.0]]), 0)
    normal, mean = normalised(weights, mask, level="sequence")
    assert mean == pytest.approx((6 + 0.2) / 2)
    assert_close(normal, weights / mean)


def test_a_mean_below_1_is_divided_by_too() -> None:
    weights, factor = normalised(torch.full((2, 3), 0.25), MASK, level="token")
    assert factor == 0.25
    assert torch.equal(weights, torch.ones(2, 3))


def test_rejection_adds_its_metrics_and_changes_no_other() -> None:
    both = correct(
        OLD, ROLLOUT, MASK,
        RolloutCorrectionConfig(rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=2.0),
    ).metrics  # fmt: skip
    apart = correct(OLD, ROLLOUT, MASK, RolloutCorrectionConfig(rollout_is="token")).metrics
    assert both.items() > apart.items()


def test_weights_that_are_all_0_are_not_divided() -> None:
    weights, factor = normalised(torch.zeros(2, 3), MASK, level="token")
    assert (factor, weights.abs().max()) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("criterion", "mean"),
    [
        ("token_k1", -math.log(1.2) / 4),
        ("seq_sum_k1", (-3 * math.log(6) + math.log(5)) / 4),  # a response's stands on each of its tokens
        ("seq_mean_k1", (-math.log(6) + math.log(5)) / 4),
        ("seq_max_k2", (3 * 0.5 * math.log(4) ** 2 + 0.5 * math.log(5) ** 2) / 4),
    ],
)
def test_each_criterion_reports_its_mean_over_sampled_tokens(criterion: str, mean: float) -> None:
    metrics = reported("rollout_rs", rollout_rs=f"{criterion},token_k3", rollout_rs_threshold=2.0)
    assert metrics[f"{criterion}_mean"] == pytest.approx(mean)
    assert metrics["token_k3_mean"] == pytest.approx((3.7 - math.log(1.2)) / 4)


def accepted(criterion: str, threshold: Any) -> list[list[bool]]:
    """By rows; what is not sampled is never accepted."""
    config = RolloutCorrectionConfig(rollout_rs=criterion, rollout_rs_threshold=threshold)
    kept: list[list[bool]] = accepted_tokens(OLD, ROLLOUT, MASK, config.criteria).tolist()
    assert kept[1][1:] == [False, False]
    return [kept[0], kept[1][:1]]


LN = math.log
# of the ratios 1/2, 3, 4 and 1/5: 0.240, 0.603, 0.961 and 1.295; 0.193, 0.901, 1.614 and 0.809
K2 = [0.5 * LN(r) ** 2 for r in (0.5, 3, 4, 0.2)]
K3 = [r - 1 - LN(r) for r in (0.5, 3, 4, 0.2)]


@pytest.mark.parametrize(
    ("criterion", "statistics"),
    [
        ("token_k2", K2),
        ("token_k3", K3),
        ("seq_sum_k2", [sum(K2[:3])] * 3 + K2[3:]),
        ("seq_sum_k3", [sum(K3[:3])] * 3 + K3[3:]),
        ("seq_mean_k2", [sum(K2[:3]) / 3] * 3 + K2[3:]),
        ("seq_mean_k3", [sum(K3[:3]) / 3] * 3 + K3[3:]),
        ("seq_max_k2", [K2[2]] * 3 + K2[3:]),
        ("seq_max_k3", [K3[2]] * 3 + K3[3:]),
    ],
)
def test_a_divergence_is_accepted_up_to_its_threshold(criterion: str, statistics: list[float]) -> None:
    for threshold in {s * factor for s in statistics for factor in (0.999, 1.001)}:
        kept = [statistic <= threshold for statistic in statistics]
        assert accepted(criterion, threshold) == [kept[:3], kept[3:]], threshold


@pytest.mark.parametrize(
    ("criterion", "inverse_ratios"),
    [
        ("token_k1", [2, 1 / 3, 1 / 4, 5]),
        ("seq_sum_k1", [1 / 6] * 3 + [5]),
        ("seq_mean_k1", [6 ** (-1 / 3)] * 3 + [5]),
    ],
)
def test_k1_bounds_the_ratio_of_engine_to_trainer(criterion: str, inverse_ratios: list[float]) -> None:
    for low, high in ((0.3, 2.1), (0.16, 1.9), (0.5, 6), (0.54, 5.1), (0.1, 0.2)):
        kept = [low <= ratio <= high for ratio in inverse_ratios]
        assert accepted(criterion, f"{low}_{high}") == [kept[:3], kept[3:]], (low, high)
    for high in (1.9, 3.5, 4.5, 7):  # one number: and its inverse
        kept = [1 / high <= ratio <= high for ratio in inverse_ratios]
        assert accepted(criterion, high) == [kept[:3], kept[3:]], high


@pytest.mark.parametrize("d", [90.0, -90.0])
def test_a_criterion_holds_the_mismatch_at_20(d: float) -> None:
    """k2 is then 20²/2."""
    for threshold, kept in ((199.5, False), (200.5, True)):
        config = RolloutCorrectionConfig(rollout_rs="token_k2", rollout_rs_threshold=threshold)
        one = tensor([[True]])
        assert accepted_tokens(tensor([[d]]), torch.zeros(1, 1), one, config.criteria).item() is kept


@pytest.mark.parametrize(
    ("criterion", "threshold", "d"), [("token_k2", 0.5, 1.0), ("token_k1", "1.0_2.0", 0.0)]
)
def test_a_criterions_bounds_are_accepted_themselves(criterion: str, threshold: Any, d: float) -> None:
    """½·1² = 0.5; and ln 1 = 0."""
    config = RolloutCorrectionConfig(rollout_rs=criterion, rollout_rs_threshold=threshold)
    assert accepted_tokens(tensor([[d]]), torch.zeros(1, 1), tensor([[True]]), config.criteria).item()


def test_a_response_that_loses_nothing_is_not_counted_as_masked() -> None:
    """Of 1/2, 3, 4 and 1/5 alone 1/5 is beyond 4.5."""
    lost = reported("rollout_rs", rollout_rs="token_k1", rollout_rs_threshold=4.5)
    assert (lost["masked_fraction"], lost["seq_masked_fraction"]) == (0.25, 0.5)


def test_every_criterion_must_hold() -> None:
    """token_k1 rejects 4 and 1/5, token_k2 below 0.25 all but 1/2, seq_max_k2 below 1 the second row."""
    assert accepted("token_k1", 3.5) == [[True, True, False], [False]]
    assert accepted("token_k1, token_k2", "3.5, 0.25") == [[True, False, False], [False]]
    assert accepted("seq_max_k2,token_k1", "1.0,6.0") == [[True, True, True], [False]]
    assert accepted("seq_max_k2,token_k1", "0.9,6.0") == [[False, False, False], [False]]
    assert accepted("token_k2,token_k3", 0.7) == [[True, False, False], [False]]


def test_a_batch_without_a_sampled_token_has_finite_metrics() -> None:
    nothing: Tensor = torch.zeros_like(MASK)
    assert set(mismatch_metrics(OLD, ROLLOUT, nothing).values()) == {0.0}
    assert spread(torch.zeros(2, 3), nothing) == {}
