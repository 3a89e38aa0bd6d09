"""The main job on real rows: GSM8K's JSONL to Parquet, a few steps, validation, a checkpoint, a resume, and a
directory that Hugging Face loads. By the command line and the shipped job files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from in_process import recorded, train
from in_process_commands import rolemesh as command
from launched import rolemesh
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolemesh.config import JobConfig, load_job

ROOT = Path(__file__).parents[2]
# A random model never answers right, and GRPO learns from differences alone: the share of digits differs.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
"""
ROWS = ROOT / "tests" / "fixtures" / "gsm8k"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rows and the model where the job files expect them, for tests to copy."""
    made = tmp_path_factory.mktemp("gsm8k")
    assert command("data", "gsm8k", ROWS, made / "data/gsm8k").returncode == 0
    assert command("model", made / "outputs/gsm8k/model").returncode == 0
    return made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
async def test_real_rows_train_validate_checkpoint_and_resume(
    algorithm: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 by `rolemesh run`, with all roles in one process; step 2 with the roles in this one."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    rows = pq.read_table(tmp_path / "data/gsm8k/train.parquet").to_pylist()
    assert len(rows) == 48
    assert rows[0]["data_source"] == "openai/gsm8k"
    assert rows[0]["reward_model"]["ground_truth"] == rows[0]["extra_info"]["answer"].split("#### ")[1]

    (tmp_path / "reward.py").write_text(REWARD)
    config = ROOT / "configs" / f"gsm8k-{algorithm}.yaml"
    overrides = (
        *("trainer.save_freq=1", "data.val_max_samples=4", "actor.optim.lr=1e-4"),
        *(["reward.custom_reward_function.path=reward.py"] if algorithm == "grpo" else []),
    )
    one_step = ("trainer.total_training_steps=1", "placement.strategy=collocate")
    async with rolemesh("run", str(config), *overrides, *one_step) as launched:
        code, output = await launched.end()
    assert code == 0, output
    assert "1 of 1" in output
    await train(load_job(config, [*overrides, "trainer.total_training_steps=2"]))

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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("answered_by", "key"),
    [("tool", "rollout.multi_turn.tools=[calc_gsm8k_reward]"), ("interaction", "rollout.multi_turn.tools=[]")],
)
async def test_real_conversations_train_checkpoint_and_resume(
    answered_by: str, key: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that an interaction answers are resumed; a resume does not know who answered."""
    shutil.copytree(folder / "outputs", tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    assert command("data", "gsm8k", ROWS, "data/gsm8k", "--answered-by", answered_by).returncode == 0
    (tmp_path / "reward.py").write_text(REWARD)

    def job(run: str, steps: int) -> JobConfig:
        overrides = [
            "rollout.multi_turn.enable=true", key, "rollout.multi_turn.max_assistant_turns=2",
            "data.max_prompt_length=1536", "data.max_response_length=192", "data.val_max_samples=2",
            "rollout.n=2", "actor.model.enable_gradient_checkpointing=false",
            "trainer.save_freq=1", "actor.optim.lr=1e-4", "reward.custom_reward_function.path=reward.py",
            f"trainer.experiment_name={run}", f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir=outputs/{run}",
        ]  # fmt: skip
        return load_job(ROOT / "configs" / "gsm8k-grpo.yaml", overrides)

    await train(job("whole", 2))
    last = recorded(job("whole", 2))[-1]
    if answered_by == "interaction":
        await train(job("resumed", 1))
        await train(job("resumed", 2))
        assert recorded(job("resumed", 2))[-1] == last
        ends = [
            job(run, 2).run_dir / "global_step_2" / "actor" / "model.safetensors"
            for run in ("whole", "resumed")
        ]
        assert ends[0].read_bytes() == ends[1].read_bytes()
    assert "val-core/openai/gsm8k/acc/mean@1" in last
    assert last["actor/grad_norm"] > 0  # type: ignore[operator]
    assert sum(share for name, share in last.items() if name.startswith("conversation/ended/")) == 1  # type: ignore[misc]
    if answered_by == "interaction":
        assert last["conversation/turns/mean"] > 1  # type: ignore[operator]
