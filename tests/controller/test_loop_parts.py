"""Parts of the loop with hand-worked numbers."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from numpy import array
from torch import tensor

from rolemesh.config.actor import ActorConfig
from rolemesh.config.job import make_job
from rolemesh.dataproto import DataProto
from rolemesh.errors import CheckpointFailed, RoleUnavailable
from rolemesh.methods import methods
from rolemesh.roles import Roles
from rolemesh.rpc.calling.clients import ActorClient, RewardClient, RolloutClient
from rolemesh.services.controller.display.curves import draw_curves, panels_of
from rolemesh.services.controller.display.progress import line_of
from rolemesh.services.controller.display.summary import accuracy_by_step
from rolemesh.services.controller.run.checkpoints import Checkpoints, ControllerState
from rolemesh.services.controller.run.stopwatch import Stopwatch
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.services.controller.stages.advantage_estimation import apply_kl_penalty, compute_advantages
from rolemesh.services.controller.stages.batch_metrics import batch_metrics, staleness_metrics, throughput
from rolemesh.services.controller.stages.validation import validation_metrics
from rolemesh.telemetry.metrics import CONTROLLER, STEP_ENDED

MASK = tensor([[True, True, True], [True, False, False]])


def scored() -> DataProto:
    return DataProto.from_dict(
        {
            "prompt_mask": tensor([[False, True], [True, True]]),
            "response_mask": MASK,
            "attention_mask": tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
            "old_log_probs": tensor([[-1.0, -2.0, -3.0], [-1.0, 0.0, 0.0]]),
            "ref_log_probs": tensor([[-1.0, -3.0, -5.0], [-3.0, 0.0, 0.0]]),
            "token_level_scores": tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 0.0]]),
            "acc": tensor([1.0, 0.0]),
        },
        {"uid": ["a", "a"], "data_source": ["x", "y"]},
    )


def test_a_token_loses_beta_times_its_kl_averaged_over_rows() -> None:
    job = make_job({"algorithm": {"use_kl_in_reward": True}})
    batch, metrics = apply_kl_penalty(scored(), job, 0.1)
    torch.testing.assert_close(batch["token_level_rewards"], tensor([[0.0, -0.1, 0.8], [0.3, 0.0, 0.0]]))
    # rows' means are (0 + 1 + 2) / 3 and 2
    assert metrics == {"actor/reward_kl_penalty": 1.5, "actor/reward_kl_penalty_coeff": 0.1}


def test_without_kl_in_the_reward_rewards_are_the_scores() -> None:
    batch, metrics = apply_kl_penalty(scored(), make_job({}), 0.1)
    assert torch.equal(batch["token_level_rewards"], batch["token_level_scores"])
    assert metrics == {}


def test_gae_is_whitened_and_returns_are_not() -> None:
    batch, _ = apply_kl_penalty(scored(), make_job({}), 0.0)
    batch["values"] = torch.zeros(2, 3)
    batch = compute_advantages(batch, make_job({}))
    torch.testing.assert_close(batch["returns"][MASK], tensor([1.0, 1.0, 1.0, 0.5]))
    torch.testing.assert_close(batch["advantages"][MASK], tensor([0.5, 0.5, 0.5, -1.5]))


def test_metrics_of_a_batch_are_over_sampled_tokens() -> None:
    batch, _ = apply_kl_penalty(scored(), make_job({}), 0.0)
    batch["advantages"] = batch["returns"] = torch.where(MASK, 2.0, 99.0)
    batch["reward_extra_info"] = [{"form": 1.0}, {"form": 0.5, "tone": -1.0}]
    metrics = batch_metrics(batch, ActorConfig())
    expected = {
        "reward/form/mean": 0.75,
        "reward/tone/mean": -1.0,
        "critic/score/mean": 0.75,
        "critic/score/max": 1.0,
        "critic/score/min": 0.5,
        "critic/advantages/mean": 2.0,
        "response_length/mean": 2.0,
        "response_length/max": 3.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 1.5,
        "perf/total_num_tokens": 7.0,
    }
    assert {key: metrics[key] for key in expected} == expected


def test_throughput_is_per_job_on_cpu_and_per_device_on_gpus() -> None:
    job = make_job({"placement": {"strategy": "hybrid", "ranks": {"policy": 3}}})  # and one for the critic
    tokens = {"perf/total_num_tokens": 120.0}
    assert throughput(tokens, job, 2.0) == 60
    for suffix in ("", "/critic"):  # which alone is trained during trainer.critic_warmup
        assert throughput(tokens | {f"perf/max_memory_allocated_gb{suffix}": 3.0}, job, 2.0) == 15


def test_advantage_spread_and_explained_variance_by_hand() -> None:
    """Returns 1, 2, 3 and 6 have the variance 14/3; what the values leave, 0, 1, 1 and 2, has 2/3."""
    batch, _ = apply_kl_penalty(scored(), make_job({}), 0.0)
    batch["returns"] = tensor([[1.0, 2.0, 3.0], [6.0, 99.0, -99.0]])
    batch["values"] = tensor([[1.0, 1.0, 2.0], [4.0, 99.0, -99.0]])
    batch["advantages"] = batch["returns"] - batch["values"]
    metrics = batch_metrics(batch, ActorConfig())
    expected = {
        **{"critic/advantages/mean": 1.0, "critic/advantages/max": 2.0, "critic/advantages/min": 0.0},
        **{"critic/returns/mean": 3.0, "critic/returns/max": 6.0, "critic/returns/min": 1.0},
        **{"critic/values/mean": 2.0, "critic/values/max": 4.0, "critic/values/min": 1.0},
        "critic/vf_explained_var": 1 - (2 / 3) / (14 / 3 + 1e-5),
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected)


def test_turn_rewards_average_the_rows_that_have_the_turn() -> None:
    batch, _ = apply_kl_penalty(scored(), make_job({}), 0.0)
    batch["returns"] = batch["advantages"] = tensor([[1.0, 2.0, 3.0], [6.0, 99.0, -99.0]])
    batch["turns"] = tensor([[1, -2, 2], [1, 0, 0]])
    batch["contexts"] = tensor([[0, 1, 1], [0, 0, 0]])
    batch["environment_rewards"] = tensor([[0.5, 0.0, 2.0], [1.5, 0.0, 0.0]])
    batch["conversation"] = [{"turns": 2.0, "why": "done"}, {"turns": 1.0, "why": "max_response_length"}]
    metrics = batch_metrics(batch, ActorConfig())
    reported = {name: value for name, value in metrics.items() if name.startswith("conversation/")}
    assert reported == {
        "conversation/turns/mean": 1.5,
        "conversation/prompts/mean": 1.5,
        "conversation/tokens/mean": 2.0,
        "conversation/reward/mean": 2.0,
        "conversation/reward/turn_1/mean": 1.0,
        "conversation/reward/turn_2/mean": 2.0,
        "conversation/ended/done": 0.5,
        "conversation/ended/max_response_length": 0.5,
    }


@pytest.mark.parametrize(
    ("mode", "entropy"),
    [
        ("token-mean", 10 / 4),
        ("token-sum", 10),
        ("seq-mean-token-sum", 10 / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", 10 / 2 / 5),
    ],
)
def test_the_entropy_is_aggregated_as_the_loss(mode: str, entropy: float) -> None:
    """Of 1, 2 and 3 in a row, and 4 in the other."""
    batch, _ = apply_kl_penalty(scored(), make_job({}), 0.0)
    batch["advantages"] = batch["returns"] = torch.zeros(2, 3)
    batch["entropys"] = tensor([[1.0, 2.0, 3.0], [4.0, 99.0, 99.0]])
    job = make_job({"actor": {"loss_agg_mode": mode, "loss_scale_factor": 5}})
    assert batch_metrics(batch, job.actor)["actor/entropy"] == pytest.approx(entropy)


@pytest.mark.parametrize(
    ("returns", "explained"), [([1.0, 3.0], 1 - 0.5 / (2 + 1e-5)), ([2.0, 2.0], 1 - 0.5e5)]
)
def test_explained_variance_of_two_tokens_and_of_equal_returns(returns: list[float], explained: float) -> None:
    """Values 1 off in one of the two: variance 1/2; returns 1 and 3 have 2, and equal ones none."""
    batch, _ = apply_kl_penalty(scored(), make_job({}), 0.0)
    batch["response_mask"] = tensor([[True, False, False], [True, False, False]])
    batch["returns"] = tensor([[returns[0], 99.0, 99.0], [returns[1], 99.0, 99.0]])
    batch["values"] = batch["returns"] - tensor([[0.0, 9.0, 9.0], [1.0, 9.0, 9.0]])
    batch["advantages"] = batch["returns"] - batch["values"]
    assert batch_metrics(batch, ActorConfig())["critic/vf_explained_var"] == pytest.approx(explained)


def test_of_a_batch_without_a_sampled_token_there_is_no_spread() -> None:
    batch, _ = apply_kl_penalty(scored(), make_job({}), 0.0)
    batch["response_mask"] = torch.zeros_like(MASK)
    batch["advantages"] = batch["returns"] = batch["values"] = torch.zeros(2, 3)
    metrics = batch_metrics(batch, ActorConfig())
    assert not [name for name in metrics if "advantages" in name or "values" in name or "explained" in name]


def test_staleness_counts_versions_over_sampled_tokens() -> None:
    """The step began with version 7. Its tokens are 2, 1 and 0 steps behind; and 1."""
    batch = DataProto({"response_mask": MASK, "weight_versions": tensor([[5, 6, 7], [6, -1, -1]])})
    assert staleness_metrics(batch, newest=7) == {
        "rollout/stale_tokens": 3.0,
        "rollout/staleness/mean": 1.0,
        "rollout/staleness/max": 2.0,
        "rollout/mixed_rows": 1.0,
    }


def test_a_row_of_the_first_weights_is_not_mixed_by_its_padding() -> None:
    batch = DataProto({"response_mask": MASK, "weight_versions": torch.where(MASK, 0, -1)})
    assert staleness_metrics(batch, newest=7)["rollout/mixed_rows"] == 0.0


def test_tokens_of_the_newest_weights_are_not_stale() -> None:
    batch = DataProto({"response_mask": MASK, "weight_versions": torch.where(MASK, 7, -1)})
    assert set(staleness_metrics(batch, newest=7).values()) == {0.0}


def test_validation_is_reported_for_each_data_source() -> None:
    assert validation_metrics(scored(), 1) == {
        "val-core/x/acc/mean@1": 1.0,
        "val-aux/x/reward/mean@1": 1.0,
        "val-core/y/acc/mean@1": 0.0,
        "val-aux/y/reward/mean@1": 0.5,
    }


def test_shown_accuracy_is_of_single_answers_over_data_sources() -> None:
    """The best of several and whether one of them is right have names of their own."""
    record = {"training/global_step": 3.0} | dict.fromkeys(
        ("val-core/x/acc/best@4/mean", "val-core/x/acc/pass@4"), 1.0
    )
    record |= {
        "val-core/x/acc/mean@4": 0.5,
        "val-core/openai/y/acc/mean@4": 0.25,
        "val-aux/x/reward/mean@4": 9.0,
    }
    assert accuracy_by_step([record, {"training/global_step": 4.0}]) == [(3, 0.375)]


def test_the_live_line_shows_the_newest_value_of_each_metric() -> None:
    """It is made anew at each change of phase, so it must not take longer the longer a run is."""
    status = RunStatus("run")
    status.set(state=State.RUNNING, phase="gen")
    status.add({"training/global_step": 1.0, "critic/score/mean": 0.25, "val-core/x/acc/mean@1": 0.5})
    status.add({"training/global_step": 2.0, "critic/score/mean": 0.75, "perf/throughput": 1234.0})
    status.records.clear()
    shown = "generating  ·  reward 0.750  ·  val accuracy 0.500  ·  1,234 tokens/s"
    assert line_of(status).plain == shown


def test_calls_of_one_phase_that_overlap_are_counted_once() -> None:
    phases: list[str] = []
    watch = Stopwatch(phases.append)
    with watch("gen"):
        with watch("reward"), watch("reward"):
            pass
        with watch("gen"):
            pass
    assert phases == ["gen", ""]  # of several at once, the one that began first
    times = watch.take()
    assert set(times) == {"timing_s/gen", "timing_s/reward"}
    assert times["timing_s/gen"] >= times["timing_s/reward"]
    assert watch.take() == {}


async def test_a_paused_run_begins_no_step_until_resumed_or_stopped() -> None:
    status = RunStatus("run")
    status.set(state=State.RUNNING)
    status.pause()
    assert status.state is State.PAUSED
    begins = asyncio.create_task(status.may_begin())
    done, _ = await asyncio.wait([begins], timeout=0.01)
    assert not done
    STEP_ENDED.set(0)  # long ago
    status.resume()
    assert await begins
    now = CONTROLLER.get_sample_value("rolemesh_step_ended_timestamp_seconds")
    assert now == pytest.approx(time.time(), abs=60)  # a pause is no step that takes long
    status.pause()
    status.request_stop()
    assert status.state is State.STOPPING
    assert not await status.may_begin()


def test_a_dangling_latest_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "global_step_3").mkdir()
    (tmp_path / "latest").write_text("global_step_5\n")
    with pytest.raises(
        CheckpointFailed, match=r"names 'global_step_5'.*there are checkpoints of steps \[3\].*resume_path"
    ):
        Checkpoints(tmp_path).latest()


def test_a_checkpoint_is_restored_if_its_replacement_was_killed(
    tmp_path: Path,
) -> None:
    for name in ("global_step_3", "global_step_5.old.partial", "global_step_5.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "latest").write_text("global_step_5\n")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == tmp_path / "global_step_5"
    checkpoints.clear_partial()
    assert checkpoints.steps() == [3, 5]


async def test_a_role_lost_during_a_checkpoint_is_role_unavailable(tmp_path: Path) -> None:
    """RoleUnavailable is an OSError: it must not become a matter of the disk."""
    job, nobody = make_job({}), ["127.0.0.1:1"]
    async with ActorClient(nobody, methods(job), patience_s=0.2) as actor:
        roles = Roles(actor, RolloutClient(nobody, methods(job)), RewardClient(nobody, methods(job)))
        with pytest.raises(RoleUnavailable, match=r"actor.*127.0.0.1:1"):
            async with Checkpoints(tmp_path).writing(roles, ControllerState(1, {}, {})):
                pass
    assert os.listdir(tmp_path) == []


def test_curves_leave_out_what_a_job_does_not_have(tmp_path: Path) -> None:
    draw_curves([], tmp_path / "none.png", "empty")
    assert not (tmp_path / "none.png").exists()
    draw_curves([{"training/global_step": 1, "actor/pg_loss": None}], tmp_path / "null.png", "null")
    assert not (tmp_path / "null.png").exists()
    many = [{"training/global_step": i, "critic/score/mean": i / 50} for i in range(50)]
    draw_curves(many, tmp_path / "one.png", "one panel")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("num_steps", [9, 60])
def test_two_curves_that_are_the_same_can_both_be_seen(num_steps: int, tmp_path: Path) -> None:
    """Without KL in the reward, score less KL is the score. Counted to the right of the legend."""
    drawn = tmp_path / "same.png"
    both = ("critic/score/mean", "critic/rewards/mean")
    records = [{"training/global_step": i} | dict.fromkeys(both, i / num_steps) for i in range(num_steps)]
    draw_curves(records, drawn, "same")
    image = imread(drawn)[:, 350:, :3]  # 598 pixels wide
    of_score, of_less_kl = (
        int((abs(image - array(colour) / 255) < 0.1).all(axis=2).sum())
        for colour in ((0x25, 0x63, 0xEB), (0xD9, 0x77, 0x06))
    )
    assert of_less_kl > 200
    assert of_score > of_less_kl / 10


def test_agent_jobs_have_curves_of_turns_calls_and_rewards() -> None:
    rows = [(1, 1.5, 0.25, 0.0, 0.5), (2, 2.0, 1.0, 0.25, 0.75)]
    names = ("training/global_step", *(f"conversation/{name}/mean" for name in
             ("turns", "tool_calls", "tool_errors", "reward")))  # fmt: skip
    assert panels_of([dict(zip(names, row, strict=True)) for row in rows]) == [
        (
            "Conversation, per row",
            [
                ("turns", [1, 2], [1.5, 2.0]),
                ("tool calls", [1, 2], [0.25, 1.0]),
                ("failed tool calls", [1, 2], [0.0, 0.25]),
            ],
        ),
        ("Reward by the environment", [("reward", [1, 2], [0.5, 0.75])]),
    ]


def test_curves_show_names_as_they_are_and_failures_only_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two $ enclose a formula for matplotlib, here one that it cannot read."""
    records = [{"training/global_step": i, "val-core/a$_$b/acc/mean@1": i / 9} for i in range(9)]
    draw_curves(records, tmp_path / "names.png", "lr$_$x")
    assert (tmp_path / "names.png").read_bytes().startswith(b"\x89PNG")
    assert not caplog.records
    draw_curves(records, tmp_path / "absent" / "names.png", "title")
    assert "could not be written" in caplog.text
