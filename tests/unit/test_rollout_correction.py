"""Importance weights between engine and trainer by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.rollout_correction import (
    accepted_tokens,
    bounded,
    importance_weights,
    mismatch_metrics,
    weight_metrics,
)
from rolemesh.config.job import make_job
from rolemesh.config.rollout_correction import RolloutCorrectionConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig
from services.controller.advantages import apply_rollout_correction

MASK = tensor([[True, True, True], [True, False, False]])
# old over rollout probability: 1/2, 3, 4 and 1/5; what stands on padding must not matter
RATIOS = tensor([[0.5, 3.0, 4.0], [0.2, 7.0, math.inf]])
OLD = tensor([[0.1, 0.6, 0.8], [0.1, 1.0, 1.0]]).log()
ROLLOUT = OLD - RATIOS.log()


def test_a_tokens_weight_is_old_over_rollout_probability() -> None:
    weights = importance_weights(OLD, ROLLOUT, MASK, level="token")
    assert_close(weights, tensor([[0.5, 3.0, 4.0], [0.2, 0.0, 0.0]]))
    assert_close(bounded(weights, None, 2.0), tensor([[0.5, 2.0, 2.0], [0.2, 0.0, 0.0]]))


def test_a_sequences_weight_is_the_product_and_stands_on_each_of_its_tokens() -> None:
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
    assert_close(importance_weights(-far, zero, mask, level=level), tensor([[math.exp(-20)]]))  # type: ignore[arg-type]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_gradient_flows_through_the_weights(level: str) -> None:
    old = OLD.clone().requires_grad_()
    assert not importance_weights(old, ROLLOUT, MASK, level=level).requires_grad  # type: ignore[arg-type]


def test_the_mismatch_by_hand() -> None:
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
        "log_ppl_diff": (math.log(trainer / engine) + math.log(5)) / 2,
        "ppl_ratio": (trainer / engine + 5) / 2,
        "chi2_token": (0.25 + 9 + 16 + 0.04) / 4 - 1,
        "chi2_seq": (36 + 0.04) / 2 - 1,
    }
    assert metrics == pytest.approx(
        {f"rollout_corr/{name}": value for name, value in expected.items()}, rel=1e-5
    )


def test_between_equal_policies_there_is_no_mismatch() -> None:
    same = mismatch_metrics(OLD, OLD, MASK)
    assert same.pop("rollout_corr/training_ppl") == same.pop("rollout_corr/rollout_ppl") > 1
    assert same.pop("rollout_corr/ppl_ratio") == 1
    assert set(same.values()) == {0.0}
    metrics = weight_metrics(importance_weights(OLD, OLD, MASK, level="token"), MASK)
    assert metrics == {
        "rollout_corr/rollout_is_mean": 1.0,
        "rollout_corr/rollout_is_min": 1.0,
        "rollout_corr/rollout_is_max": 1.0,
        "rollout_corr/rollout_is_std": 0.0,
        "rollout_corr/rollout_is_eff_sample_size": 1.0,
    }


def test_metrics_of_weights_by_hand() -> None:
    """Of 1, 3, 1, 3: mean 2, deviation 1, effective sample size 8²/(4·20)."""
    metrics = weight_metrics(tensor([[1.0, 3.0, 1.0], [3.0, 9.0, 9.0]]), MASK)
    assert metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": 2.0,
            "rollout_corr/rollout_is_min": 1.0,
            "rollout_corr/rollout_is_max": 3.0,
            "rollout_corr/rollout_is_std": 1.0,
            "rollout_corr/rollout_is_eff_sample_size": 0.8,
        }
    )


def test_one_weight_that_is_all_makes_an_effective_sample_of_one_token() -> None:
    metrics = weight_metrics(tensor([[1e9, 0.0, 0.0], [0.0, 0.0, 0.0]]), MASK)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1 / 4)


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


def test_every_criterion_must_hold() -> None:
    """token_k1 rejects 4 and 1/5, token_k2 below 0.25 all but 1/2, seq_max_k2 below 1 the second row."""
    assert accepted("token_k1", 3.5) == [[True, True, False], [False]]
    assert accepted("token_k1, token_k2", "3.5, 0.25") == [[True, False, False], [False]]
    assert accepted("seq_max_k2,token_k1", "1.0,6.0") == [[True, True, True], [False]]
    assert accepted("seq_max_k2,token_k1", "0.9,6.0") == [[False, False, False], [False]]
    assert accepted("token_k2,token_k3", 0.7) == [[True, False, False], [False]]


def test_what_is_rejected_is_out_of_the_loss_mask_and_told() -> None:
    job = make_job(
        {"algorithm": {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 3.5}}}
    )
    batch, metrics = apply_rollout_correction(judged(), job)
    assert batch["loss_mask"].tolist() == [[True, True, False], [False, False, False]]
    assert torch.equal(batch["response_mask"], MASK)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 4)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2}, "'token_k4' is none of token_k1, token_k2"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "'seq_max_k1' is none of"),
        ({"rollout_rs": "token_k1"}, "rollout_rs is token_k1 and rollout_rs_threshold is not set"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold is set and rollout_rs is not"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"}, "has 2 values for 1 of rollout_rs"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "it is one number, the largest"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"}, "'2.0_0.5'; it is a number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "much"}, "'much'; it is a number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "it is a number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": 0.55}, "two are written in quotes"),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 0.55}, "two are written in quotes"),
        ({"loss_type": "reinforce"}, "loss_type is reinforce and bypass_mode false"),
        ({"bypass_mode": True, "rollout_is": "token"}, "ppo_clip and rollout_is token"),
    ],
)
def test_a_correction_that_contradicts_itself_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make_job({"algorithm": {"rollout_correction": keys}})


@pytest.mark.parametrize(
    ("loss_mode", "bypass_mode", "message"),
    [
        ("bypass", False, "loss_mode is bypass and algorithm.rollout_correction.bypass_mode false"),
        ("gspo", True, "loss_mode is gspo; set loss_mode to bypass, or bypass_mode to"),
    ],
)
def test_bypass_and_another_loss_contradict(loss_mode: str, bypass_mode: bool, message: str) -> None:
    keys = {"rollout_correction": {"bypass_mode": bypass_mode}}
    with pytest.raises(InvalidConfig, match=message):
        make_job({"algorithm": keys, "actor": {"policy_loss": {"loss_mode": loss_mode}}})


@pytest.mark.parametrize("estimator", ["egpo", "optimal_token_baseline"])
def test_bypass_and_an_estimator_that_reads_the_actors_pass_contradict(estimator: str) -> None:
    with pytest.raises(
        InvalidConfig, match=f"adv_estimator {estimator} reads .*bypass_mode leaves that call out"
    ):
        make_job(
            {
                "algorithm": {"adv_estimator": estimator, "rollout_correction": {"bypass_mode": True}},
                "rollout": {"n": 2},
            }
        )


def test_with_bypass_there_is_nothing_to_correct_before_the_loss() -> None:
    job = make_job({"algorithm": {"rollout_correction": {"bypass_mode": True}}})
    batch, metrics = apply_rollout_correction(judged(), job)
    assert metrics == {}
    assert set(batch.columns) == set(judged().columns)


def judged() -> DataProto:
    return DataProto({"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK})


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [[0.5, 2.0, 2.0], [0.2, 0.0, 0.0]]), ("sequence", [[2.0, 2.0, 2.0], [0.2, 0.0, 0.0]])],
)
def test_a_job_chooses_the_level_and_the_threshold_is_2(level: str, expected: list[list[float]]) -> None:
    job = make_job({"algorithm": {"rollout_correction": {"rollout_is": level}}})
    batch, metrics = apply_rollout_correction(judged(), job)
    assert_close(batch["rollout_is_weights"], tensor(expected))
    greatest = {"token": 4.0, "sequence": 6.0}[level]  # before it is cut
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(greatest)


def test_without_a_correction_the_mismatch_is_told_and_nothing_is_weighed() -> None:
    batch, metrics = apply_rollout_correction(judged(), make_job({}))
    assert "rollout_is_weights" not in batch
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(1.2) / 4)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(7.7 / 4)


def test_a_batch_without_a_sampled_token_has_finite_metrics() -> None:
    nothing: Tensor = torch.zeros_like(MASK)
    assert set(mismatch_metrics(OLD, ROLLOUT, nothing).values()) == {0.0}
    assert weight_metrics(torch.zeros(2, 3), nothing) == {}
