"""The main job on real rows: GSM8K's JSONL to Parquet, a few steps, validation, a checkpoint, a resume, and a
directory that Hugging Face loads. By the command line and the shipped job files, as a person does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
# A random model never answers right, and GRPO learns from differences alone: the share of digits differs.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
"""
ROWS = ROOT / "tests" / "fixtures" / "gsm8k"


def rolemesh(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rolemesh", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_real_rows_train_validate_checkpoint_and_resume(algorithm: str, tmp_path: Path) -> None:
    rolemesh("data", "gsm8k", str(ROWS), "data/gsm8k", cwd=tmp_path)
    train = pq.read_table(tmp_path / "data/gsm8k/train.parquet").to_pylist()
    assert len(train) == 48
    assert train[0]["data_source"] == "openai/gsm8k"
    assert train[0]["reward_model"]["ground_truth"] == train[0]["extra_info"]["answer"].split("#### ")[1]

    rolemesh("model", "outputs/gsm8k/model", cwd=tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    run = (
        *("run", str(ROOT / "configs" / f"gsm8k-{algorithm}.yaml"), "trainer.save_freq=1"),
        *("data.val_max_samples=4", "actor.optim.lr=1e-4"),
        *(["reward.custom_reward_function.path=reward.py"] if algorithm == "grpo" else []),
    )
    first = rolemesh(*run, "trainer.total_training_steps=1", cwd=tmp_path)
    assert "1 of 1" in first
    rolemesh(*run, "trainer.total_training_steps=2", cwd=tmp_path)

    directory = tmp_path / "outputs" / f"gsm8k-{algorithm}"
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["training/global_step"] for record in records] == [0, 1, 2]
    assert "val-core/openai/gsm8k/acc/mean@1" in records[0]
    assert {"actor/pg_loss", "actor/ppo_kl", "actor/grad_norm", "critic/score/mean", "timing_s/gen"} <= {
        *records[2]
    }
    assert ("critic/vf_loss" in records[2]) == (algorithm == "ppo")
    assert records[2]["actor/grad_norm"] >= 0

    assert (directory / "latest").read_text().strip() == "global_step_2"
    actor = directory / "global_step_2" / "actor"
    model = AutoModelForCausalLM.from_pretrained(actor)
    tokenizer = AutoTokenizer.from_pretrained(actor)
    ids = tokenizer("How many clips?", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "outputs/gsm8k/model").state_dict()
    changed = [name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])]
    assert changed, "two steps of training moved no weight"
