"""trainer.save_best: the checkpoint of the best validation is there at the end, whatever else was deleted."""

from __future__ import annotations

import shutil
from math import inf, nan
from pathlib import Path

import pytest
from in_process import recorded, small_job, train

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.run.best import is_best
from rolemesh.services.controller.run.checkpoints import Checkpoints
from rolemesh.services.controller.run.loop import Run

METRIC = "val-aux/numbers/reward/mean@4"
STEPS = 10
SAMPLED = ("rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=1", "rollout.val_kwargs.n=4")
VALIDATED = (
    *SAMPLED,
    "actor.optim.lr=0.005",
    "trainer.test_freq=1",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_best={METRIC}",
)
BESTS_ALONE = (*VALIDATED, "trainer.save_freq=-1")


@pytest.mark.parametrize(
    ("name", "value", "earlier", "expected"),
    [
        ("val-core/gsm8k/acc/mean@1", 0.5, [], True),
        ("val-core/gsm8k/acc/mean@1", 0.5, [0.4, 0.3], True),
        ("val-core/gsm8k/acc/mean@1", 0.5, [0.4, 0.5], False),  # one as good is not better
        ("val-core/gsm8k/acc/mean@1", 0.5, [0.6], False),
        ("val-core/gsm8k/acc/mean@1", 0.5, [None], True),  # was not finite
        ("val-core/gsm8k/acc/mean@1", nan, [], False),
        ("val-core/gsm8k/acc/mean@1", inf, [], False),
        ("val/loss", 0.5, [0.4], False),
        ("val/loss", 0.5, [0.6], True),
    ],
)
def test_the_best_is_better_than_all_before(
    name: str, value: float, earlier: list[float | None], expected: bool
) -> None:
    records = [{"training/global_step": float(step), name: score} for step, score in enumerate(earlier, 1)]
    unvalidated = {"training/global_step": 9.0}
    before_training = {"training/global_step": 0.0, name: -9.0 if name.endswith("loss") else 9.0}
    assert is_best(name, {name: value}, [before_training, *records, unvalidated]) is expected


def bests(job: JobConfig) -> list[int]:
    """The steps whose validation was better than that of every earlier step, from the run's records."""
    found, best = [], -inf
    for record in recorded(job):
        step, value = record["training/global_step"], record[METRIC]
        assert step is not None
        assert value is not None
        if step and value > best:
            found.append(int(step))
            best = value
    return found


async def best_of(job: JobConfig) -> int:
    await train(job)
    return int((job.run_dir / "best").read_text().strip().removeprefix("global_step_"))


@pytest.fixture(scope="module")
async def kept_all(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    job = small_job(tmp_path_factory.mktemp("best"), tiny_model, "run", *BESTS_ALONE)
    assert await best_of(job) == bests(job)[-1]
    return job


def test_a_checkpoint_is_written_after_each_best_step_alone(kept_all: JobConfig) -> None:
    assert 1 < len(bests(kept_all)) < STEPS  # a run on which the test can fail
    assert Checkpoints(kept_all.run_dir).steps() == bests(kept_all)


async def test_the_best_stays_beside_the_newest(kept_all: JobConfig, tiny_model: Path, tmp_path: Path) -> None:
    newest_alone = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1")
    job = small_job(tmp_path, tiny_model, "run", *VALIDATED, *newest_alone)
    best = await best_of(job)
    assert best == bests(kept_all)[-1] < STEPS
    assert Checkpoints(job.run_dir).steps() == [best, STEPS]


async def test_a_resumed_run_knows_the_best_before_it(
    kept_all: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    """It begins at the first best, with the records until then and what had become of later steps."""
    job = small_job(tmp_path, tiny_model, "run", *BESTS_ALONE)
    first = f"global_step_{bests(kept_all)[0]}"
    shutil.copytree(kept_all.run_dir / first, job.run_dir / first)
    for name in ("metrics.jsonl", "best"):
        shutil.copy(kept_all.run_dir / name, job.run_dir / name)
    (job.run_dir / "latest").write_text(first + "\n")
    assert await best_of(job) == bests(kept_all)[-1]
    assert recorded(job) == recorded(kept_all)
    assert Checkpoints(job.run_dir).steps() == bests(kept_all)


async def test_an_absent_metric_is_refused_with_the_available_ones(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *VALIDATED, "trainer.save_best=val-core/acc")
    with pytest.raises(InvalidConfig, match=rf"save_best is val-core/acc, but .* only .*{METRIC}"):
        await train(job)


def test_the_best_of_no_validation_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"save_best is val/loss, but nothing is .*test_freq is -1"):
        small_job(tmp_path, tiny_model, "run", "trainer.test_freq=-1", "trainer.save_best=val/loss")


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        (METRIC, True),
        ("val-core/digits/acc/mean@4", True),
        ("val-aux/digits/acc/pass@2", True),
        ("val-core/numbers/acc/maj@4/mean", True),  # if the reward reports what it found
        ("val-core/gsm8k/acc/mean@4", False),  # no such data source
        ("val-core/numbers/acc/mean@1", False),  # each prompt is answered four times
        ("val-aux/numbers/acc/best@8/mean", False),
        ("val/loss", False),
    ],
)
def test_an_impossible_metric_is_refused_before_roles_are_asked(
    name: str, is_known: bool, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *VALIDATED, f"trainer.save_best={name}")
    tokenizer = load_tokenizer(job.actor.model)
    if is_known:
        Run(job, tokenizer)
        return
    with pytest.raises(InvalidConfig, match=rf"save_best is {name}, but .* only .*{METRIC}"):
        Run(job, tokenizer)
    once = small_job(
        tmp_path, tiny_model, "run", *VALIDATED, f"trainer.save_best={name}", "trainer.val_only=true"
    )
    Run(once, tokenizer)  # it saves nothing


async def test_an_unavailable_majority_vote_ends_the_run_before_step_1(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The reward returns no answer to vote on, which only the first validation shows."""
    vote = "val-core/numbers/acc/maj@4/mean"
    job = small_job(tmp_path, tiny_model, "run", *VALIDATED, f"trainer.save_best={vote}")
    with pytest.raises(InvalidConfig, match=rf"save_best is {vote}, but .* only .*{METRIC}"):
        await train(job)
    assert [record["training/global_step"] for record in recorded(job)] == [0]
