"""What the controller shows of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from in_process import small_job, train

from rolemesh.services.controller.run.run_dir import read_metrics
from rolemesh.services.controller.service.status import RunStatus
from rolemesh.services.processes.launch import shown_to_prometheus
from rolemesh.telemetry.metrics import CONTROLLER


def shown(name: str, **labels: str) -> float | None:
    return CONTROLLER.get_sample_value(name, labels)


async def test_state_phases_and_times_of_a_run(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=2", "trainer.test_freq=4")
    began = time.time()
    await train(job)
    ended = time.time()

    assert shown("rolemesh_run_state", state="finished") == 1
    assert shown("rolemesh_run_state", state="running") == 0
    phases = "gen old_log_prob ref values reward adv update_critic update_actor update_weights testing"
    running = {
        phase: shown("rolemesh_phase_running", phase=phase) for phase in [*phases.split(), "save_checkpoint"]
    }
    assert running == dict.fromkeys(running, 0)
    step, checkpoint = map(
        shown, ("rolemesh_step_ended_timestamp_seconds", "rolemesh_checkpoint_timestamp_seconds")
    )
    assert step is not None
    assert checkpoint is not None
    assert began < step < checkpoint < ended
    records = read_metrics(job.run_dir / "metrics.jsonl")
    saved = [record["training/global_step"] for record in records if "timing_s/save_checkpoint" in record]
    assert saved == [2, 4]  # a save's seconds are told once


def test_a_run_is_starting_until_its_controller_finds_its_roles() -> None:
    RunStatus("run")
    assert [shown("rolemesh_run_state", state=state) for state in ("starting", "running", "finished")] == [
        1,
        0,
        0,
    ]


async def test_a_resumed_runs_checkpoint_age_is_that_of_the_checkpoint(
    tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=2", "trainer.total_training_steps=2")
    await train(job)
    os.utime(job.run_dir / "global_step_2", (1_000, 1_000))
    await train(job)
    assert shown("rolemesh_checkpoint_timestamp_seconds") == 1_000


def test_a_run_that_cannot_tell_prometheus_runs_all_the_same(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    (tmp_path / "run.targets.json").mkdir()
    with shown_to_prometheus(job, {"actor-0": "127.0.0.1:1"}):
        assert "Prometheus cannot find this run" in caplog.text
