"""The same job by TRL: the same model, prompts in the same order, groups, rewards, learning rate and loss."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pyarrow.parquet as pq

from benchmarks.real.model import RUNS
from benchmarks.real.ours import greedy_accuracy, job_of, recorded
from benchmarks.step.contestants import ROOT, interpreter
from rolemesh.config import JobConfig
from rolemesh.data.order import PromptOrder

MICRO_BATCH = 32  # rows of a pass of TRL's
STEPS = 10  # half of the job's: TRL's take minutes


def train(seed: int) -> dict[str, Any]:
    """Make a seed's run, if it is not there.

    Returns:
        As `benchmarks.real.ours.train`; `greedy` has the base model and the last step alone.
    """
    job, _ = job_of(seed)
    folder = RUNS / f"larger-trl-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "result.json"
    if not result.exists():
        (folder / "setting.json").write_text(json.dumps(setting_of(job, seed)))
        command = [interpreter("grpo"), "-m", "benchmarks.real.with_trl", str(folder)]
        subprocess.run(command, check=True, cwd=ROOT)
        result.write_text(json.dumps({"greedy": greedy_accuracy(seed, folder / "model")}))
    steps = dict(enumerate(json.loads((folder / "steps.json").read_text()), 1))
    return {
        "seed": seed,
        "greedy": {0: recorded(job)["greedy"][0], len(steps): json.loads(result.read_text())["greedy"]},
        **{kind: {number: step[kind] for number, step in steps.items()} for kind in ("sampled", "seconds")},
    }


def setting_of(job: JobConfig, seed: int) -> dict[str, Any]:
    """What benchmarks/real/with_trl.py reads."""
    rows = pq.read_table(job.data.train_files[0], columns=["prompt", "reward_model"]).to_pylist()
    order = PromptOrder(len(rows), job.data)
    chosen = [rows[position] for number in range(1, STEPS + 1) for position in order.rows(number)]
    return {
        "seed": seed,
        "model": str(job.actor.model.path),
        "reward": str(job.reward.custom_reward_function.path),
        "prompts": [
            {"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in chosen
        ],
        "prompts_per_step": job.data.train_batch_size,
        "group": job.rollout.n,
        "response_tokens": job.data.max_response_length,
        "steps": STEPS,
        "learning_rate": job.actor.optim.lr,
        "micro_batch": MICRO_BATCH,
    }
