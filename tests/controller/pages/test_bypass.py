"""Runs whose old log-probabilities are the engine's, and runs that reject what the engine drew."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import small_job, train

from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.run.run_dir import read_metrics

BYPASS = "algorithm.rollout_correction.bypass_mode=true"
CORRECTION = "algorithm.rollout_correction"
TWO_STEPS = ("trainer.total_training_steps=2", "trainer.val_before_train=false")


@pytest.mark.parametrize(
    "overrides",
    [
        (BYPASS, f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=9"),
        (BYPASS, f"{CORRECTION}.loss_type=reinforce", f"{CORRECTION}.rollout_is=sequence"),
    ],
)
async def test_a_run_in_bypass_mode_never_asks_the_actor_for_log_probs(
    tmp_path: Path, tiny_model: Path, overrides: tuple[str, ...]
) -> None:
    job = small_job(tmp_path, tiny_model, "bypass", *TWO_STEPS, *overrides)
    await train(job)
    first, second = read_metrics(job.run_dir / "metrics.jsonl")
    for record in (first, second):
        assert "timing_s/old_log_prob" not in record
        assert "timing_s/update_actor" in record
        assert "actor/entropy" not in record
        # of the update: two mini-batches, and the second finds another policy than the one that answered
        assert 0 < abs(record["rollout_corr/kl"] or 0) < 0.1
        assert (
            (record["rollout_corr/rollout_is_raw_min"] or 0)
            < 1
            < (record["rollout_corr/rollout_is_raw_max"] or 0)
        )
    # two mini-batches: at the first the policy is the engine's but for rounding
    assert abs(first["actor/ppo_kl"] or 0) < 0.1
    if "reinforce" in overrides[1]:
        assert first["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.5)
    else:
        assert first["rollout_corr/rollout_rs_masked_fraction"] == 0
        assert "rollout_corr/rollout_rs_token_k2_mean" in first


def test_the_graph_of_a_step_shows_whose_log_probs_they_are(tmp_path: Path, tiny_model: Path) -> None:
    plain = {node.name for node in record_step(small_job(tmp_path, tiny_model, "plain")).nodes}
    bypass = {node.name for node in record_step(small_job(tmp_path, tiny_model, "bypass", BYPASS)).nodes}
    assert plain - bypass == {"actor.compute_log_probs"}
    assert bypass - plain == {"controller.take_rollout_log_probs"}


async def test_a_run_that_rejects_every_token_learns_nothing(tmp_path: Path, tiny_model: Path) -> None:
    """Engine and trainer agree, so their ratio is never between 1.5 and 2."""
    rejection = (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=1.5_2.0")
    job = small_job(tmp_path, tiny_model, "rejecting", *TWO_STEPS, *rejection)
    await train(job)
    for record in read_metrics(job.run_dir / "metrics.jsonl"):
        assert record["rollout_corr/rollout_rs_seq_masked_fraction"] == 1
        assert record["rollout_corr/rollout_rs_masked_fraction"] == 1
        assert record["actor/grad_norm"] == record["critic/grad_norm"] == 0
        assert record["actor/pg_loss"] == record["critic/vf_loss"] == 0
        assert record["actor/ppo_kl"] == record["critic/vpred_mean"] == 0  # means of nothing
        assert record["actor/entropy"] > 0
