"""The job of examples/smollm2 by `rolemesh run`, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.real.model import EXAMPLE, RUNS
from benchmarks.real.shares import peak_flops, shares
from rolemesh.config import JobConfig, load_job
from rolemesh.services.controller.record import STEP
from rolemesh.services.controller.run.run_dir import read_metrics

NAMES = {"greedy": "val-core/larger/acc/mean@1", "sampled": "critic/score/mean", "seconds": "timing_s/step"}


def job_of(seed: int, *overrides: str) -> tuple[JobConfig, list[str]]:
    """The example's job with its paths under RUNS and this seed, and the arguments that make it."""
    run = RUNS / f"larger-{seed}"
    arguments = [
        str(EXAMPLE / "job.yaml"),
        f"actor.model.path={RUNS / 'models' / 'smollm2'}",
        f"data.train_files={RUNS / 'data' / 'larger' / 'train.parquet'}",
        f"data.val_files={RUNS / 'data' / 'larger' / 'test.parquet'}",
        f"reward.custom_reward_function.path={EXAMPLE / 'larger.py'}",
        f"trainer.default_local_dir={run}",
        f"trainer.validation_data_dir={run / 'validation'}",
        *(f"{section}.seed={seed}" for section in ("data", "actor", "rollout")),
        *overrides,
    ]
    return load_job(arguments[0], arguments[1:]), arguments


def train(seed: int) -> dict[str, Any]:
    """Make the rest of a seed's run.

    Returns:
        The seed; by step `greedy`, `sampled` and `seconds`; by phase `share_of_peak`. `sampled` is the share of
        a step's own responses that are right. They are held out as well: no prompt is in two steps, and they
        are scored before the update.
    """
    job, arguments = job_of(seed)
    measured = job.run_dir / "peak_flops"  # when the run began
    if not measured.exists():
        measured.parent.mkdir(parents=True, exist_ok=True)
        measured.write_text(str(peak_flops()))
    peak = float(measured.read_text())
    rolemesh("run", *arguments)
    records = read_metrics(job.run_dir / "metrics.jsonl")
    return {"seed": seed, **recorded(job), "share_of_peak": shares(records, job, peak), "peak_flops": peak}


def greedy_accuracy(seed: int, model: Path) -> float:
    """Held-out accuracy of a model that something else has trained."""
    run = model.with_name("validation-of-it")
    elsewhere = [f"trainer.default_local_dir={run}", "trainer.validation_data_dir=null"]
    job, arguments = job_of(seed, f"actor.model.path={model}", "trainer.val_only=true", *elsewhere)
    rolemesh("run", *arguments)
    [accuracy] = recorded(job)["greedy"].values()
    return float(accuracy)


def recorded(job: JobConfig) -> dict[str, dict[int, float]]:
    """What NAMES has, by step."""
    records = read_metrics(job.run_dir / "metrics.jsonl")
    return {
        kind: {int(r[STEP] or 0): value for r in records if (value := r.get(name)) is not None}
        for kind, name in NAMES.items()
    }


def rolemesh(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rolemesh", *arguments], check=True)
