"""The demo's model and problems."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rolemesh.config import load_job
from rolemesh.config.model import ModelConfig
from rolemesh.data import PromptDataset
from rolemesh.models.loading import load_causal_lm, load_tokenizer
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.services.command_line.arithmetic import arithmetic_problems
from rolemesh.services.command_line.demo import (
    CHAT_TEMPLATE,
    NUM_VAL,
    demonstrations,
    greedy_accuracy,
    make_demo_model,
    prepare_demo,
    without_carry,
)

CONFIGS = Path(__file__).parents[2] / "configs"


def byte_tokenizer_of_the_demo() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.mark.parametrize(
    ("problem", "careless"),
    [
        ((37, 48), "75"),
        ((12, 34), "46"),
        ((95, 48), "33"),
        ((55, 52), "07"),
        ((99, 99), "88"),
        ((50, 50), "00"),
    ],
)
def test_the_demonstrator_forgets_every_carry(problem: tuple[int, int], careless: str) -> None:
    assert without_carry(*problem) == careless


def test_imitation_cannot_solve_the_task() -> None:
    """The careless answer is likelier than the right one wherever there is a carry: three problems in four."""
    problems = [pair for side in arithmetic_problems(NUM_VAL, 1) for pair in side]
    share = sum(without_carry(a, b) == str(a + b) for a, b in problems) / len(problems)
    # ones 0-9 and tens 1-9 that add to less than 10: 55/100 times 36/81
    assert share == pytest.approx(0.55 * 36 / 81)
    for seed in (1, 2, 3):
        val = arithmetic_problems(NUM_VAL, seed)[1]
        assert sum(without_carry(a, b) == str(a + b) for a, b in val) / NUM_VAL < 0.35


def test_demonstrations_are_prompts_and_answers_as_in_the_job() -> None:
    tokenizer = byte_tokenizer_of_the_demo()
    shown = demonstrations([(37, 48), (95, 48)], tokenizer)
    assert tokenizer.decode(shown.prompts[0]) == "<|im_start|>37+48=<|im_end|>"
    answers = {
        name: [tokenizer.decode(row[row >= 0]) for row in getattr(shown, name)]
        for name in ("right", "careless")
    }
    assert answers == {
        "right": ["#### 85<|im_end|>", "#### 143<|im_end|>"],
        "careless": ["#### 75<|im_end|>", "#### 33<|im_end|>"],
    }


def test_the_demo_is_made_only_if_absent_and_fits_its_job_file(tmp_path: Path) -> None:
    prepare_demo(tmp_path, seed=2, num_steps=3)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in tmp_path.iterdir()} == {"model", "data"}
    prepare_demo(tmp_path, seed=2, num_steps=3)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == made

    job = load_job(CONFIGS / "tiny.yaml")
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path / "model")))
    for split in ("train", "val"):
        data = PromptDataset([tmp_path / "data" / f"{split}.parquet"], job.data, tokenizer)
        assert data.batch([0])["prompt_mask"].all()
    assert len(data) == NUM_VAL
    longest = demonstrations([(99, 99)], tokenizer)
    assert longest.prompts.shape[1] == job.data.max_prompt_length
    assert longest.right.shape[1] == job.data.max_response_length


def test_a_seed_gives_the_same_model_bit_for_bit(tmp_path: Path) -> None:
    one, other = (tmp_path / name for name in ("one", "other"))
    for directory in (one, other):
        make_demo_model(directory, seed=1, num_steps=2)
    weights = [load_causal_lm(ModelConfig(path=str(path)), "demo").state_dict() for path in (one, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_greedy_accuracy_is_the_share_of_right_generated_answers(tiny_model: Path) -> None:
    model = load_causal_lm(ModelConfig(path=str(tiny_model)), "demo")
    shown = demonstrations([(37, 48), (12, 34), (95, 48), (20, 20)], byte_tokenizer_of_the_demo())
    ids = shown.prompts
    for _ in range(9):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    given = ids[:, -9:].clone()
    assert greedy_accuracy(model, replace(shown, right=given)) == 1.0
    given[2, 5] = (given[2, 5] + 1) % 256
    assert greedy_accuracy(model, replace(shown, right=given)) == 0.75
    given[1, 3:] = -100  # what is padding is not compared
    assert greedy_accuracy(model, replace(shown, right=given)) == 0.75
