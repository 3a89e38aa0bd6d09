"""Importance weights between engine and trainer by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rolemesh.algos.rollout_correction import (
    importance_weights,
    mismatch_metrics,
    truncate,
    weight_metrics,
)
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from services.controller.advantages import apply_rollout_correction

MASK = tensor([[True, True, True], [True, False, False]])
# old over rollout probability: 1/2, 3, 4 and 1/5; what stands on padding must not matter
RATIOS = tensor([[0.5, 3.0, 4.0], [0.2, 7.0, math.inf]])
OLD = tensor([[0.1, 0.6, 0.8], [0.1, 1.0, 1.0]]).log()
ROLLOUT = OLD - RATIOS.log()


def test_a_tokens_weight_is_old_over_rollout_probability() -> None:
    weights = importance_weights(OLD, ROLLOUT, MASK, level="token")
    assert_close(weights, tensor([[0.5, 3.0, 4.0], [0.2, 0.0, 0.0]]))
    assert_close(truncate(weights, 2.0), tensor([[0.5, 2.0, 2.0], [0.2, 0.0, 0.0]]))


def test_a_sequences_weight_is_the_product_and_stands_on_each_of_its_tokens() -> None:
    weights = importance_weights(OLD, ROLLOUT, MASK, level="sequence")
    assert_close(weights, tensor([[6.0, 6.0, 6.0], [0.2, 0.0, 0.0]]))
    assert_close(truncate(weights, 5.0), tensor([[5.0, 5.0, 5.0], [0.2, 0.0, 0.0]]))


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
    """Ratios 1/2, 3, 4, 1/5: their product is 6/5; k3 is Σ(ratio − 1) − ln(6/5) = 3.7 − ln(6/5)."""
    metrics = mismatch_metrics(OLD, ROLLOUT, MASK)
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(1.2) / 4)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((3.7 - math.log(1.2)) / 4)


def test_between_equal_policies_there_is_no_mismatch() -> None:
    assert set(mismatch_metrics(OLD, OLD, MASK).values()) == {0.0}
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
