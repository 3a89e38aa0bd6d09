"""The examples: their job files, their numbers by hand, and two short runs. `make examples` runs all."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from in_process import train, write_data
from in_process_commands import rolemesh

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.plugin_imports import NAMED, forget
from rolemesh.config import load_job
from rolemesh.dataproto import DataProto
from rolemesh.services.controller.pages.choice import record_step
from rolemesh.services.controller.run.run_dir import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = sorted(path.parent.name for path in EXAMPLES.glob("*/job.yaml"))


@pytest.fixture(autouse=True)
def _in_the_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Job files name plug-ins from here. What these declare is forgotten after the test."""
    monkeypatch.chdir(EXAMPLES)
    yield
    for origin in {part.origin for catalog in NAMED.values() for part in catalog.values()} - {BUILT_IN}:
        forget(origin)


def module(path: str) -> ModuleType:
    spec = spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def test_every_folder_is_in_the_readme_and_in_make_examples() -> None:
    folders = {
        path.name
        for path in EXAMPLES.iterdir()
        if path.is_dir() and path.name not in ("outputs", "__pycache__")
    }
    readme = (EXAMPLES / "README.md").read_text()
    script = (EXAMPLES.parent / "scripts/run-examples").read_text()
    assert {name for name in folders if f"| `{name}/` |" not in readme or f"def {name}(" not in script} == set()


@pytest.mark.parametrize("name", JOBS)
def test_a_job_file_loads_without_warning_and_records_its_step(name: str) -> None:
    job = load_job("tiny.yaml", [f"{name}/job.yaml"])
    assert job.trainer.experiment_name == name
    assert [unused.key for unused in job.unused_keys() if unused.is_set] == []
    assert "actor.update" in record_step(job).to_text()


def test_an_example_is_short() -> None:
    for path in EXAMPLES.glob("*/*.py"):
        assert len(path.read_text().splitlines()) <= (100 if path.parent.name == "loop" else 70), path
    assert len((EXAMPLES / "reward_service/main.ts").read_text().splitlines()) < 100


# ----------------------------------------------------------------------------------------- by hand


def test_surprise_gives_an_advantage_to_the_minority_alone() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])  # one right, one prompt
    rewards = torch.cat([rewards, 1 - rewards])
    rewards[:, 0] = 0  # and a second prompt, where one is wrong
    mask = torch.tensor([[True, True]] * 8)
    mask[3, 0] = False
    uid = ["a"] * 4 + ["b"] * 4
    advantages, _ = module("estimator/surprise.py").compute_surprise(rewards, mask, uid, wrong_weight=0.5)
    assert advantages.dtype == torch.float32
    assert advantages[:, 1].tolist() == [1, 0, 0, 0, -0.5, 0, 0, 0]
    assert advantages[3, 0] == 0


def test_surprise_of_an_even_number_compares_with_the_middle_two() -> None:
    """It compares with the mean of the two."""
    rewards = torch.tensor([[0.0], [1.0], [4.0]])
    mask = torch.ones(3, 1, dtype=torch.bool)
    advantages, _ = module("estimator/surprise.py").compute_surprise(rewards, mask, ["a"] * 3, wrong_weight=1.0)
    assert advantages[:, 0].tolist() == [0 - 2.5, 1 - 2.0, 4 - 0.5]


def test_tapered_loss_weighs_right_answers_1_and_wrong_by_ratio() -> None:
    log_probs = torch.tensor([[0.5, 0.5, 2.0]]).log().requires_grad_()
    old = torch.tensor([[0.25, 1.0, 0.5]]).log()
    found = module("policy_loss/tapered.py").tapered_policy_loss(
        log_probs, old, torch.tensor([[1.0, -1.0, -1.0]]), torch.ones(1, 3, dtype=torch.bool), most=1.0
    )
    found.losses.sum().backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-1.0, 0.5, 1.0]]))
    assert found.shares["tapered"].tolist() == [[0, 1, 0]]


def test_the_page_keeps_each_prompts_extremes() -> None:
    scores = torch.tensor([0.0, 2.0, 1.0, 3.0, 5.0, 4.0])[:, None]
    batch = DataProto.from_dict({"token_level_scores": scores}, {"uid": ["a", "a", "a", "b", "b", "b"]})
    page = module("page/extremes.py")
    assert page.extremes(batch, 1) == [0, 1, 3, 4]
    assert page.extremes(batch, 3) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("answer", "score"), [("#### 85", 1.0), ("#### 75", 0.2), ("#### 8", 0.0), ("85", 1.0), ("#### 185", 0.4)]
)
def test_the_reward_counts_digits_from_the_right(answer: str, score: float) -> None:
    assert module("reward/digits.py").compute_score("", answer, "85", {})["score"] == pytest.approx(score)


def test_the_reward_manager_takes_a_price_from_number_or_dict() -> None:
    frugal = module("reward_manager/frugal.py").score_frugally
    row = {"data_source": "", "solution_str": "#### 85", "ground_truth": "85", "extra_info": {}}
    [by_rule] = frugal(lambda **row: 1.0, [row], per_character=0.1)
    [by_function] = frugal(lambda **row: {"score": 1.0, "digits": 2}, [row], per_character=0.1)
    assert by_rule == {"score": pytest.approx(0.3), "acc": 1.0, "price": pytest.approx(0.7)}
    assert by_function == {"score": pytest.approx(0.3), "digits": 2, "price": pytest.approx(0.7)}


def test_the_data_set_has_only_carries_and_no_row_in_both_splits() -> None:
    carries = module("dataset/carries.py").Carries
    train_set, val = carries(99, "train"), carries(99, "val")
    assert len(train_set) + len(val) == 9 * 9 * 45
    assert not set(train_set.pairs) & set(val.pairs)
    assert all(a % 10 + b % 10 >= 10 for a, b in train_set.pairs)
    assert train_set[0]["reward_model"]["ground_truth"] == str(sum(train_set.pairs[0]))


# ------------------------------------------------------------------------------------------- runs


def overrides(directory: Path, model: Path, name: str) -> list[str]:
    data = write_data(directory, "train", 8)
    return [
        f"{name}/job.yaml",
        f"actor.model.path={model}",
        f"data={{train_files: [{data}], train_batch_size: 4, max_prompt_length: 48, max_response_length: 8}}",
        "actor.ppo_mini_batch_size=4",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "rollout.n=2",
        "reward={custom_reward_function: {path: reward/digits.py}, num_workers: 1}",
        f"trainer.default_local_dir={directory / name}",
        "trainer.total_training_steps=1",
        "trainer.logger=[file]",
    ]


async def test_the_estimator_trains(tmp_path: Path, tiny_model: Path) -> None:
    job = load_job("tiny.yaml", overrides(tmp_path, tiny_model, "estimator"))
    await train(job)
    [step] = read_metrics(job.run_dir / "metrics.jsonl")
    assert step["actor/grad_norm"] is not None


async def test_the_actor_uses_the_distribution_that_min_p_sampled(tmp_path: Path, tiny_model: Path) -> None:
    job = load_job("tiny.yaml", [*overrides(tmp_path, tiny_model, "engine"), "rollout.options.min_p=0.6"])
    await train(job)
    [step] = read_metrics(job.run_dir / "metrics.jsonl")
    for end in ("min", "max"):
        assert step[f"rollout_corr/rollout_is_raw_{end}"] == pytest.approx(1, abs=1e-4)
    assert 0 < float(step["actor/entropy"]) < 2  # top_k 16 alone would leave 2.7


def test_rolemesh_graph_prints_the_pages_order() -> None:
    text = rolemesh("graph", "tiny.yaml", "page/job.yaml").stdout
    calls = [line.split()[-1] for line in text.splitlines() if line.split()[-1:] and "." in line.split()[-1]]
    assert calls.index("reward.compute_scores") < calls.index("actor.compute_log_probs")
    assert json.dumps(calls).count("actor.compute_log_probs") == 1
