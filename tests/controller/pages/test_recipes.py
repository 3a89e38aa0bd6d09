"""configs/recipes: each file is one method, whatever job file it is laid on, and runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from in_process import small_job, train

from rolemesh.config import JobConfig, load_job
from rolemesh.config.yaml_file import read_yaml
from rolemesh.errors import InvalidConfig
from rolemesh.services.controller.run.run_dir import read_metrics
from rolemesh.services.reward.functions.custom import load_function

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))
DAPO_ON_TINY = ["data.max_response_length=12", "reward.overlong_buffer.len=3"]
# No two answers are worth the same, so that each step has something to learn; with gdpo.yaml's components.
REWARD = """
import zlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    score = zlib.crc32(solution_str.encode()) / 2**32
    return {"score": score, "correct": score, "format": float(solution_str[:1].isdigit())}
"""


def laid_on(recipe: Path, base: str, *overrides: str) -> JobConfig:
    return load_job(CONFIGS / base, [*with_estimator(recipe), *overrides])


def with_estimator(recipe: Path) -> list[str]:
    """The recipe; and GRPO's before it where it is one to be laid on another."""
    alone = "adv_estimator" in read_yaml(recipe)["algorithm"]
    return [str(recipe)] if alone else [str(CONFIGS / "recipes" / "grpo.yaml"), str(recipe)]


def method(job: JobConfig) -> dict[str, Any]:
    """Everything in a job that is of the method: all of `algorithm`, and of the loss what is used."""
    algorithm = job.algorithm.model_dump()
    if not job.algorithm.use_kl_in_reward:
        del algorithm["kl_ctrl"], algorithm["kl_penalty"]
    loss = {"policy_loss", "loss_agg_mode", "loss_scale_factor", "use_kl_loss", "entropy_coeff"}
    loss |= {name for name in type(job.actor).model_fields if name.startswith(("clip_ratio", "tau_"))}
    if job.actor.use_kl_loss:
        loss |= {"kl_loss_coef", "kl_loss_type"}
    return {"algorithm": algorithm, "actor": job.actor.model_dump(include=loss), "n": job.rollout.n}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_one_method_whatever_it_is_laid_on(recipe: Path) -> None:
    on_ppo = method(laid_on(recipe, "gsm8k-ppo.yaml"))
    assert method(laid_on(recipe, "gsm8k-grpo.yaml")) == on_ppo
    assert method(laid_on(recipe, "tiny.yaml", *DAPO_ON_TINY * (recipe.stem == "dapo"))) == on_ppo


def test_the_answers_of_the_demo_have_no_room_for_dapos_buffer() -> None:
    with pytest.raises(InvalidConfig, match=r"overlong_buffer\.len is 12, but data\.max_response_length is 9"):
        laid_on(CONFIGS / "recipes" / "dapo.yaml", "tiny.yaml")


def test_bypass_does_not_replace_the_loss_of_another_recipe() -> None:
    with pytest.raises(InvalidConfig, match=r"bypass_mode is true.*loss_mode is gspo"):
        load_job(
            CONFIGS / "gsm8k-ppo.yaml", [str(CONFIGS / "recipes" / f"{n}.yaml") for n in ("gspo", "bypass")]
        )


def test_a_recipe_before_the_job_file_is_refused() -> None:
    """What comes later wins: the job file's own method would be trained."""
    recipe, job = str(CONFIGS / "recipes" / "grpo.yaml"), str(CONFIGS / "gsm8k-ppo.yaml")
    with pytest.raises(InvalidConfig, match=rf"{recipe} .*the job file comes first: {job} {recipe}"):
        load_job(recipe, [job])


def test_a_wrong_key_is_said_to_be_of_any_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "laid.yaml").write_text("actor: {lr: 1}")
    with pytest.raises(InvalidConfig, match=rf"gsm8k-ppo.yaml, {tmp_path}/laid.yaml: unknown key 'actor.lr'"):
        load_job(CONFIGS / "gsm8k-ppo.yaml", [str(tmp_path / "laid.yaml"), "trainer.save_freq=1"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
async def test_a_recipe_makes_two_steps(recipe: Path, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "scored.py").write_text(REWARD)
    job = small_job(
        tmp_path, tiny_model, "run", *with_estimator(recipe), "trainer.total_training_steps=2",
        "data.max_response_length=12", "data.train_batch_size=2", "actor.use_dynamic_bsz=true",
        f"reward.custom_reward_function.path={tmp_path / 'scored.py'}",
    )  # fmt: skip
    await train(job)
    records = [r for r in read_metrics(job.run_dir / "metrics.jsonl") if "actor/grad_norm" in r]
    assert len(records) == 2
    assert all(record["actor/grad_norm"] > 0 for record in records)
    assert all(value is None or math.isfinite(value) for record in records for value in record.values())


@pytest.mark.parametrize(
    ("answer", "correct", "form"),
    [("so #### 1,234", 1, 1), ("#### 12. or #### 1234.", 1, 1), ("#### 1235", 0, 1), ("1234", 0, 0)],
)
def test_the_reward_of_gdpo_returns_its_components(
    answer: str, correct: float, form: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)  # what the recipe's path starts from
    job = laid_on(CONFIGS / "recipes" / "gdpo.yaml", "gsm8k-ppo.yaml")
    compute_score = load_function(job.reward.custom_reward_function)
    scored = compute_score(data_source="openai/gsm8k", solution_str=answer, ground_truth="1234", extra_info={})
    assert scored == {"score": correct, "acc": correct, "correct": correct, "format": form}
    assert set(job.algorithm.gdpo_reward_keys) <= set(scored)
