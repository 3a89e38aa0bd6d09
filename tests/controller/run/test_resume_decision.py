"""`resume_path` and `disable` decide once where a run starts; later starts go on from its newest checkpoint."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
from in_process import recorded, small_job, train, workers
from interrupted import (
    NOISY,
    assert_same_checkpoint,
    assert_same_end,
    contents,
    steps,
    train_and_cancel_after,
    train_and_stop_in,
)
from rich.console import Console

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.errors import CheckpointFailed, InvalidConfig
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.display.progress import Display
from rolemesh.services.controller.run.checkpoints import Checkpoints
from rolemesh.services.controller.run.decision import FILE, start_of
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import read_metrics

BEGAN = re.compile(r"resuming from (\S+) after step (\d+)(.*)")


@pytest.fixture(scope="module")
async def unbroken(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """Four steps of PPO with nothing in between."""
    job = small_job(tmp_path_factory.mktemp("unbroken"), tiny_model, "run", *NOISY)
    await train(job)
    return job


def resuming(path: Path) -> tuple[str, str]:
    return ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")


async def train_and_read(job: JobConfig) -> tuple[str, int, str]:
    """Train to the end. Return the checkpoint, the step and the rest of the line that says where it began."""
    printed = io.StringIO()
    display = Display(Console(file=printed, width=80))
    with workers(job) as roles:
        await Run(job, load_tokenizer(job.actor.model), display).train(roles)
    [(path, step, rest)] = BEGAN.findall(printed.getvalue())
    return path, int(step), rest


def times(job: JobConfig) -> dict[float | None, float | None]:
    """When each step ended: a step that was made again ended later."""
    return {r["training/global_step"]: r["ended_at"] for r in read_metrics(job.run_dir / "metrics.jsonl")}


# ------------------------------------------------------------------------------------- whole runs


async def test_a_restart_repeats_no_step_and_keeps_a_named_checkpoint(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(unbroken.run_dir, tmp_path / "run")
    named = tmp_path / "run" / "global_step_1"
    spelled_otherwise = named.parent / ".." / "run" / "global_step_1"
    job = small_job(
        tmp_path, tiny_model, "run", *NOISY, "trainer.max_actor_ckpt_to_keep=1", *resuming(spelled_otherwise)
    )
    before = contents(named)
    await train_and_stop_in(3, job)
    assert steps(job) == [0, 1, 2, 3]
    ended = times(job)
    path, step, rest = await train_and_read(job)
    assert (path, step) == (str(job.run_dir / "global_step_3"), 3)
    assert f"an earlier start went to global_step_1. To go there again, delete {job.run_dir / FILE}" in rest
    assert_same_end(job, unbroken)
    assert times(job).items() >= ended.items()
    assert Checkpoints(job.run_dir).steps() == [1, 4]
    assert contents(named) == before
    assert (await train(job)).step == 4  # and a third start finds all that it needs


async def test_a_restart_no_longer_needs_another_runs_checkpoint(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    named = shutil.copytree(unbroken.run_dir / "global_step_1", tmp_path / "global_step_1")
    job = small_job(tmp_path, tiny_model, "run", *NOISY, *resuming(named))
    await train_and_stop_in(3, job)
    shutil.rmtree(named)
    path, step, _ = await train_and_read(job)
    assert (path, step) == (str(job.run_dir / "global_step_3"), 3)
    assert recorded(job) == [each for each in recorded(unbroken) if (each["training/global_step"] or 0) > 1]
    assert_same_checkpoint(job, unbroken)


@pytest.mark.parametrize("written", [True, False], ids=["decided", "interrupted while it is written"])
async def test_without_an_own_checkpoint_a_run_restarts_at_resume_path(
    written: bool, unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(unbroken.run_dir, tmp_path / "run")
    named = tmp_path / "run" / "global_step_1"
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=4", "trainer.test_freq=2", *resuming(named))
    await train_and_cancel_after(2, job)
    if not written:
        (job.run_dir / FILE).unlink()  # as it is after `latest` was moved and before the decision is written
    path, step, _ = await train_and_read(job)
    assert (path, step) == (str(named), 1)
    assert_same_end(job, unbroken)


async def test_a_run_begun_with_disable_resumes_from_its_checkpoint(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *NOISY, "trainer.resume_mode=disable")
    await train_and_stop_in(2, job)
    path, step, rest = await train_and_read(job)
    assert (path, step) == (str(job.run_dir / "global_step_2"), 2)
    assert rest == "; an earlier start began this run (trainer.resume_mode: disable)"
    assert_same_end(job, unbroken)


async def test_a_run_begun_with_disable_restarts_without_a_checkpoint(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    overrides = ("trainer.save_freq=4", "trainer.test_freq=2", "trainer.resume_mode=disable")
    job = small_job(tmp_path, tiny_model, "run", *overrides)
    await train_and_cancel_after(1, job)
    await train(job)
    assert_same_end(job, unbroken)


async def test_val_only_uses_resume_path_and_changes_no_record(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    """It writes no resume decision, either."""
    shutil.copytree(unbroken.run_dir, tmp_path / "run")
    named = tmp_path / "run" / "global_step_2"
    job = small_job(tmp_path, tiny_model, "run", *NOISY, "trainer.val_only=true", *resuming(named))
    before = recorded(job)
    await train(job)
    assert recorded(job)[:-1] == before
    validated, [trained] = recorded(job)[-1], [r for r in before if r["training/global_step"] == 2]
    scores = {key for key in validated if key.startswith("val-")}
    assert scores
    assert {key: validated[key] for key in scores} == {key: trained[key] for key in scores}
    assert (job.run_dir / "latest").read_text() == "global_step_4\n"
    assert not (job.run_dir / FILE).exists()


# -------------------------------------------------------------- decisions, on checkpoints without models


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory with checkpoints of steps 1 to 4."""
    for step in range(1, 5):
        add_checkpoint(tmp_path / "run", step)
    return tmp_path / "run"


def add_checkpoint(run_dir: Path, step: int) -> Path:
    path = run_dir / f"global_step_{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "controller.json").write_text("{}")
    (run_dir / "latest").write_text(f"global_step_{step}\n")
    return path


def job_in(run_dir: Path, mode: str, path: Path | None = None) -> JobConfig:
    trainer = {"default_local_dir": str(run_dir), "resume_mode": mode}
    return make_job({"trainer": trainer | ({"resume_from_path": str(path)} if path else {})})


def begin(job: JobConfig) -> Path | None:
    """Start as a run does, up to the point at which its roles have loaded."""
    start = start_of(job, Checkpoints(job.run_dir))
    start.write_down()
    return start.checkpoint


def test_a_decision_is_followed_once_and_another_one_again(run_dir: Path) -> None:
    first, second = (job_in(run_dir, "resume_path", run_dir / f"global_step_{step}") for step in (1, 2))
    assert begin(first) == run_dir / "global_step_1"
    made = add_checkpoint(run_dir, 3)
    assert begin(first) == made
    assert begin(job_in(run_dir, "auto")) == made
    assert begin(first) == made  # auto in between decided nothing
    assert begin(second) == run_dir / "global_step_2"
    assert begin(second) == run_dir / "global_step_2"
    assert begin(first) == run_dir / "global_step_1"


def test_a_decision_is_followed_again_once_its_file_is_deleted(run_dir: Path) -> None:
    job = job_in(run_dir, "resume_path", run_dir / "global_step_1")
    begin(job)
    made = add_checkpoint(run_dir, 3)
    assert begin(job) == made
    (run_dir / FILE).unlink()
    assert begin(job) == run_dir / "global_step_1"


def test_a_run_directory_that_has_moved_holds_the_same_decision(run_dir: Path, tmp_path: Path) -> None:
    begin(job_in(run_dir, "resume_path", run_dir / "global_step_1"))
    moved = run_dir.rename(tmp_path / "moved")
    made = add_checkpoint(moved, 3)
    assert begin(job_in(moved, "resume_path", moved / "global_step_1")) == made


def test_a_decision_that_is_refused_is_not_written(run_dir: Path) -> None:
    before = contents(run_dir)
    with pytest.raises(InvalidConfig, match="nowhere is not a checkpoint"):
        begin(job_in(run_dir, "resume_path", run_dir / "nowhere"))
    with pytest.raises(InvalidConfig, match=r"holds checkpoints of steps \[1, 2, 3, 4\]"):
        begin(job_in(run_dir, "disable"))
    assert contents(run_dir) == before


def test_a_run_that_began_otherwise_is_not_begun_anew_by_disable(run_dir: Path) -> None:
    begin(job_in(run_dir, "resume_path", run_dir / "global_step_1"))
    with pytest.raises(InvalidConfig, match="holds checkpoints of steps"):
        begin(job_in(run_dir, "disable"))


def test_disable_begins_anew_if_only_the_checkpoints_are_deleted(run_dir: Path) -> None:
    for path in run_dir.glob("global_step_*"):
        shutil.rmtree(path)
    job = job_in(run_dir, "disable")
    assert begin(job) is None
    assert begin(job) is None
    assert begin(job_in(run_dir, "auto")) is None
    made = add_checkpoint(run_dir, 1)
    assert begin(job) == made
    shutil.rmtree(made)
    assert begin(job) is None


@pytest.mark.parametrize(("best", "begins_at", "kept"), [(2, 3, True), (3, 3, True), (4, 3, False)])
def test_a_run_that_goes_back_keeps_only_an_earlier_best(
    run_dir: Path, best: int, begins_at: int, kept: bool
) -> None:
    (run_dir / "best").write_text(f"global_step_{best}\n")
    begin(job_in(run_dir, "resume_path", run_dir / f"global_step_{begins_at}"))
    assert (run_dir / "best").exists() == kept


def test_auto_names_the_foreign_checkpoint_that_began_the_run(run_dir: Path, tmp_path: Path) -> None:
    """Until the run has a checkpoint of its own."""
    named, new = run_dir / "global_step_2", tmp_path / "new"
    new.mkdir()
    assert begin(job_in(new, "resume_path", named)) == named
    with pytest.raises(
        InvalidConfig, match=rf"keep trainer\.resume_mode=resume_path .*={re.escape(str(named))}"
    ):
        begin(job_in(new, "auto"))
    made = add_checkpoint(new, 3)
    assert begin(job_in(new, "auto")) == made


def test_a_decision_that_cannot_be_read_names_its_file(run_dir: Path) -> None:
    (run_dir / FILE).write_text('{"resume_mode": ')
    with pytest.raises(CheckpointFailed, match=rf"{FILE} cannot be read.*Delete it"):
        begin(job_in(run_dir, "disable"))
    assert begin(job_in(run_dir, "auto")) == run_dir / "global_step_4"


@pytest.mark.parametrize(("best", "kept"), [(2, True), (3, False)])
def test_a_renamed_copy_of_a_checkpoint_keeps_its_step(run_dir: Path, best: int, kept: bool) -> None:
    (run_dir / "best").write_text(f"global_step_{best}\n")
    copy = shutil.copytree(run_dir / "global_step_2", run_dir / "good")
    (copy / "controller.json").write_text('{"step": 2}')
    job = job_in(run_dir, "resume_path", copy)
    assert begin(job) == copy
    assert (run_dir / "best").exists() is kept
    assert begin(job) == copy  # the decision is written: `latest` names it
