"""Policies learn: well-known methods, each by its recipe, on the additions of the demo.

All begin with the demo's model, which has half learnt to add. Its weights are in tests/fixtures/adder.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import train
from torch import Tensor

from rolemesh.config import load_job
from rolemesh.config.model import ModelConfig
from rolemesh.models.loading import load_causal_lm, load_tokenizer
from rolemesh.services.command_line import demo
from rolemesh.services.command_line.arithmetic import arithmetic_problems
from rolemesh.services.controller.run.run_dir import read_metrics

CONFIGS = Path(__file__).parents[2] / "configs"
WEIGHTS = Path(__file__).parents[1] / "fixtures" / "adder"
MADE_BY = json.loads((WEIGHTS / "made_by.json").read_text(encoding="utf-8"))
ACCURACY = "val-core/rolemesh/arithmetic/acc/mean@1"
# with rollout.n of each, a seed, and steps: the clip range of gspo lets the policy change more slowly
RECIPES = {
    "ppo": (1, 1, 6),
    "grpo": (8, 2, 6),
    "rloo": (4, 3, 6),
    "reinforce++": (1, 1, 6),
    "remax": (1, 2, 6),
    "gpg": (8, 3, 6),
    "gspo": (8, 1, 8),
    "dapo": (8, 2, 6),
}
NUM_ROWS = 128  # responses a step, whatever rollout.n
# From below a third to a half and more. A share of 256 answers has a standard error of 0.03.
MARGIN = 0.25


@pytest.fixture(scope="session")
def adder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's data and model, with the weights of the fixture."""
    directory = demo.prepare_demo(tmp_path_factory.mktemp("adder"), num_steps=0)
    shutil.copy(WEIGHTS / "model.safetensors", directory / "model")
    return directory


def held_out(directory: Path) -> tuple[Any, demo.Demonstrations]:
    """Return the model in directory/model, and the answers to the problems that no training sees."""
    config = ModelConfig(path=str(directory / "model"))
    shown = demo.demonstrations(arithmetic_problems(demo.NUM_VAL, 1)[1], load_tokenizer(config))
    return load_causal_lm(config, "demo"), shown


@torch.no_grad()
def log_probs(model: Any, prompts: Tensor, answers: Tensor) -> Tensor:
    """Return the log-probability [N] of each whole answer."""
    of_tokens = demo.response_logits(model, prompts, answers).log_softmax(-1)
    of_answer = of_tokens.gather(-1, answers.clamp(min=0)[..., None])[..., 0]
    return torch.where(answers < 0, 0.0, of_answer).sum(1)


def test_the_model_is_the_one_that_the_demo_makes(adder: Path) -> None:
    """By its module's constants, and because it answers as often wrong as the demonstrator forgets carries."""
    assert MADE_BY["constants"] == {name: value for name, value in vars(demo).items() if name.isupper()}
    model, shown = held_out(adder)
    assert demo.greedy_accuracy(model, shown) == pytest.approx(MADE_BY["accuracy"], abs=0.01)
    has_carry = (shown.careless != shown.right).any(1)
    for answers, share in ((shown.careless, demo.FORGETS), (shown.right, 1 - demo.FORGETS)):
        shares = log_probs(model, shown.prompts, answers)[has_carry].exp()
        assert shares.mean().item() == pytest.approx(share, abs=0.1)


def test_imitation_makes_the_demonstrators_answers_likelier(tmp_path: Path) -> None:
    """After 40 steps their mean log-probability is less than half as far from 0."""
    means = []
    for num_steps in (0, 40):
        demo.make_demo_model(tmp_path / str(num_steps) / "model", num_steps=num_steps)
        model, shown = held_out(tmp_path / str(num_steps))
        means.append(log_probs(model, shown.prompts, shown.careless).mean().item())
    assert means[1] > means[0] / 2


@pytest.mark.parametrize("recipe", RECIPES)
async def test_a_policy_learns_to_add(recipe: str, adder: Path, tmp_path: Path) -> None:
    n, seed, num_steps = RECIPES[recipe]
    seeds = [f"{section}.seed={seed}" for section in ("data", "actor", "critic", "rollout")]
    job = load_job(
        CONFIGS / "tiny.yaml",
        [
            str(CONFIGS / "recipes" / f"{recipe}.yaml"), *seeds,
            f"actor.model.path={adder / 'model'}",
            f"data.train_files={adder / 'data' / 'train.parquet'}",
            f"data.val_files={adder / 'data' / 'val.parquet'}",
            "data.train_max_samples=1024",  # more than the steps take
            f"data.train_batch_size={NUM_ROWS // n}", f"actor.ppo_mini_batch_size={NUM_ROWS // n // 2}",
            "data.max_response_length=12", "reward.overlong_buffer.len=3",  # no right sum is overlong
            "actor.optim.lr=5e-4", "actor.optim.lr_warmup_steps=0", "critic.optim.lr_warmup_steps=0",
            f"trainer.total_training_steps={num_steps}", f"trainer.test_freq={num_steps}",
            "trainer.val_before_train=false",  # its accuracy is the fixture's
            "trainer.save_freq=-1", "trainer.rollout_data_dir=null", "trainer.validation_data_dir=null",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ],
    )  # fmt: skip
    assert job.rollout.n == n
    await train(job)
    [after] = (r[ACCURACY] for r in read_metrics(job.run_dir / "metrics.jsonl") if ACCURACY in r)
    assert after > MADE_BY["accuracy"] + MARGIN
