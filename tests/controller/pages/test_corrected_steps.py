"""How a job corrects the mismatch between engine and trainer: weights, masks, metrics, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from mismatch import MASK, OLD, ROLLOUT
from torch import tensor
from torch.testing import assert_close

from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, WeightsUnavailable
from rolemesh.services.controller.job_warnings import warn_of_stale_rows
from rolemesh.services.controller.stages.advantage_estimation import apply_rollout_correction


def test_rejected_tokens_leave_the_loss_mask_and_are_reported() -> None:
    job = make_job(
        {"algorithm": {"rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 3.5}}}
    )
    batch, metrics = apply_rollout_correction(mismatched(), job)
    assert batch["loss_mask"].tolist() == [[True, True, False], [False, False, False]]
    assert torch.equal(batch["response_mask"], MASK)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / 4)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 2}, "'token_k4' is none of token_k1, token_k2"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "'seq_max_k1' is none of"),
        ({"rollout_rs": "token_k1"}, "rollout_rs is token_k1, but rollout_rs_threshold is not set"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold is set, but rollout_rs is not"),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "1,2"},
            "has 2 values for 1 criteria of rollout_rs",
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2.0"}, "expected one number, the maximum"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "2.0_0.5"}, "'2.0_0.5'; expected a number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "much"}, "'much'; expected a number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "expected a number above 0"),
        (
            {"rollout_is": "token", "rollout_is_threshold": 0.55},
            "in quotes, because Helm, unlike a job file, reads",
        ),
        ({"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 0.55}, "write two bounds in quotes"),
        ({"loss_type": "reinforce"}, "loss_type is reinforce, but bypass_mode is false"),
        (
            {"bypass_mode": True, "rollout_is": "token"},
            "rollout_is is token with bypass_mode and loss_type ppo_clip",
        ),
        ({"rollout_is_batch_normalize": True}, "but rollout_is is not set, so there are no weights"),
        (
            {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
            | {"rollout_is_batch_normalize": True},
            "rollout_is_batch_normalize and bypass_mode are true",
        ),
    ],
)
def test_a_correction_that_contradicts_itself_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        make_job({"algorithm": {"rollout_correction": keys}})


@pytest.mark.parametrize(
    ("loss_mode", "bypass_mode", "message"),
    [
        ("bypass", False, "loss_mode is bypass, but algorithm.rollout_correction.bypass_mode is false"),
        ("gspo", True, "loss_mode is gspo; set loss_mode to bypass, or bypass_mode to"),
    ],
)
def test_bypass_and_another_loss_contradict(loss_mode: str, bypass_mode: bool, message: str) -> None:
    keys = {"rollout_correction": {"bypass_mode": bypass_mode}}
    with pytest.raises(InvalidConfig, match=message):
        make_job({"algorithm": keys, "actor": {"policy_loss": {"loss_mode": loss_mode}}})


@pytest.mark.parametrize("estimator", ["egpo", "optimal_token_baseline"])
def test_bypass_refuses_an_estimator_that_reads_actor_log_probs(estimator: str) -> None:
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
    batch, metrics = apply_rollout_correction(mismatched(), job)
    assert metrics == {}
    assert set(batch.columns) == set(mismatched().columns)


def mismatched() -> DataProto:
    return DataProto({"old_log_probs": OLD, "rollout_log_probs": ROLLOUT, "response_mask": MASK})


@pytest.mark.parametrize(
    ("level", "expected"),
    [("token", [[0.5, 2.0, 2.0], [0.2, 0.0, 0.0]]), ("sequence", [[2.0, 2.0, 2.0], [0.2, 0.0, 0.0]])],
)
def test_a_job_chooses_the_level_and_the_threshold_is_2(level: str, expected: list[list[float]]) -> None:
    job = make_job({"algorithm": {"rollout_correction": {"rollout_is": level}}})
    batch, _ = apply_rollout_correction(mismatched(), job)
    assert_close(batch["rollout_is_weights"], tensor(expected))


def test_without_a_correction_the_mismatch_is_only_reported() -> None:
    batch, metrics = apply_rollout_correction(mismatched(), make_job({}))
    assert "rollout_is_weights" not in batch
    assert metrics["rollout_corr/kl"] == pytest.approx(-math.log(1.2) / 4)
    assert metrics["rollout_corr/rollout_is_raw_mean"] == pytest.approx(7.7 / 4)


def far(kl: float) -> DataProto:
    """Every token's log-probability differs by this much, in nats."""
    return DataProto({"old_log_probs": ROLLOUT - kl, "rollout_log_probs": ROLLOUT, "response_mask": MASK})


def test_a_kl_above_max_rollout_kl_ends_the_run_before_an_update() -> None:
    """Unless older weights are allowed: generation ahead, or no bound."""
    with pytest.raises(WeightsUnavailable, match=r"kl is 0\.6 nats per token, above .*engine hf has"):
        apply_rollout_correction(far(0.6), make_job({}))
    apply_rollout_correction(far(0.4), make_job({}))
    ahead = {"rollout": {"mode": "async"}}
    for job in (ahead, {"trainer": {"max_rollout_kl": None}}, {"trainer": {"max_rollout_kl": 0.7}}):
        apply_rollout_correction(far(0.6), make_job(job))
    with pytest.raises(WeightsUnavailable):  # async, but none ahead
        apply_rollout_correction(far(0.6), make_job(ahead | {"trainer": {"max_staleness": 0}}))


def test_a_difference_that_is_no_number_is_above_every_bound() -> None:
    with pytest.raises(WeightsUnavailable, match="kl is nan nats per token"):
        apply_rollout_correction(far(math.nan), make_job({"trainer": {"max_rollout_kl": 1e9}}))
    apply_rollout_correction(far(math.nan), make_job({"trainer": {"max_rollout_kl": None}}))


def test_groups_that_waited_are_exempt_from_max_rollout_kl() -> None:
    """Row 1 was generated by version 6, for a step that begins with version 7 and has 1 + 3 tokens."""
    batch = far(0.4)
    batch["old_log_probs"][1] = ROLLOUT[1] - 0.9
    batch["weight_versions"] = torch.where(MASK, tensor([[7], [6]]), -1)
    _, metrics = apply_rollout_correction(batch, make_job({}), newest=7)
    assert metrics["rollout_corr/kl"] == pytest.approx((3 * 0.4 + 0.9) / 4)
    with pytest.raises(WeightsUnavailable, match=r"kl is 0\.525 nats"):
        apply_rollout_correction(batch, make_job({}))
    batch["weight_versions"] = torch.where(MASK, tensor([[6], [7]]), -1)  # the other row waited
    with pytest.raises(WeightsUnavailable, match=r"kl is 0\.9 nats"):
        apply_rollout_correction(batch, make_job({}), newest=7)


REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}


@pytest.mark.parametrize(
    ("loss_mode", "correction", "mode", "warned"),
    [
        ("gpg", {}, "async", True),
        ("gpg", {}, "sync", False),
        ("gpg", {"rollout_is": "token"}, "async", False),
        ("vanilla", {}, "async", False),
        ("bypass", REINFORCE, "async", True),
        ("vanilla", REINFORCE, "async", True),
        ("bypass", REINFORCE | {"rollout_is": "token"}, "async", False),
        ("bypass", {"bypass_mode": True}, "async", False),
    ],
)
def test_generation_ahead_without_clip_and_weight_is_warned_of(
    loss_mode: str, correction: dict[str, Any], mode: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(
        {
            "algorithm": {"rollout_correction": correction},
            "actor": {"policy_loss": {"loss_mode": loss_mode}},
            "rollout": {"mode": mode},
            "trainer": {"max_staleness": 1},
        }
    )
    warn_of_stale_rows(job)
    loss = "bypass" if correction.get("bypass_mode") else loss_mode
    words = f"up to 1 step older than those that learn from them, but the policy loss ({loss}) has"
    assert (words in caplog.text) is warned
    assert bool(caplog.text) is warned


@pytest.mark.parametrize(
    ("mode", "trainer", "warned"),
    [
        ("async", {}, True),
        ("async", {"max_staleness": 1}, False),
        ("async", {"max_staleness": 0}, False),
        ("sync", {}, False),
    ],
)
def test_async_mode_without_a_set_max_staleness_is_warned_of(
    mode: str, trainer: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A job of verl has mode async, and means a server."""
    warn_of_stale_rows(make_job({"rollout": {"mode": mode}, "trainer": trainer}))
    said = [message.partition(",")[0] for message in caplog.messages]
    assert said == ["rollout.mode is async"] * warned
