"""Policies learn: well-known methods, each by its recipe, on the additions of the demo."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import train

from rolemesh.config import load_job
from rolemesh.services.command_line.demo import prepare_demo
from rolemesh.services.controller.run.run_dir import read_metrics

CONFIGS = Path(__file__).parents[2] / "configs"
ACCURACY = "val-core/rolemesh/arithmetic/acc/mean@1"
# with rollout.n of each, and a seed
RECIPES = {
    "ppo": (1, 1),
    "grpo": (8, 2),
    "rloo": (4, 3),
    "reinforce++": (1, 1),
    "remax": (1, 2),
    "gpg": (8, 3),
    "gspo": (8, 1),
    "dapo": (8, 2),
}
NUM_ROWS = 128  # responses a step, whatever rollout.n
# From below a third to two thirds and more. A share of 256 answers has a standard error of 0.03.
MARGIN = 0.25


@pytest.fixture(scope="session")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model and data: a model that has half learnt to add."""
    return prepare_demo(tmp_path_factory.mktemp("adder"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.timeout(900)  # the first of them makes the model
async def test_a_policy_learns_to_add(recipe: str, adder: Path, tmp_path: Path) -> None:
    n, seed = RECIPES[recipe]
    seeds = [f"{section}.seed={seed}" for section in ("data", "actor", "critic", "rollout")]
    job = load_job(
        CONFIGS / "tiny.yaml",
        [
            str(CONFIGS / "recipes" / f"{recipe}.yaml"), *seeds,
            f"actor.model.path={adder / 'model'}",
            f"data.train_files={adder / 'data' / 'train.parquet'}",
            f"data.val_files={adder / 'data' / 'val.parquet'}",
            f"data.train_batch_size={NUM_ROWS // n}", f"actor.ppo_mini_batch_size={NUM_ROWS // n // 2}",
            "data.max_response_length=12", "reward.overlong_buffer.len=3",  # no right sum is overlong
            "actor.optim.lr=5e-4", "actor.optim.lr_warmup_steps=0", "critic.optim.lr_warmup_steps=0",
            "trainer.total_training_steps=8", "trainer.test_freq=8", "trainer.save_freq=-1",
            "trainer.rollout_data_dir=null", "trainer.validation_data_dir=null",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    assert job.rollout.n == n
    await train(job)
    before, after = (r[ACCURACY] for r in read_metrics(job.run_dir / "metrics.jsonl") if ACCURACY in r)
    assert after > before + MARGIN
