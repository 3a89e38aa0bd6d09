"""A run that was stopped or killed ends where an unbroken one ends, bit for bit."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from forks import FORKS
from full_disk import files_of_at_most
from in_process import REWARD, recorded, small_job, train, workers
from interrupted import NOISY, assert_same_end, contents, steps, train_and_stop_in
from ranked import exit_codes

from rolemesh.config import JobConfig
from rolemesh.data.parquet import write_rows
from rolemesh.dataproto import DataProto
from rolemesh.errors import CheckpointFailed, InvalidConfig
from rolemesh.forwarding import Forwarding
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Actor, Metrics
from rolemesh.services.controller.run import checkpoints as module
from rolemesh.services.controller.run.checkpoints import Checkpoints, ControllerState
from rolemesh.services.controller.run.loop import Run


@pytest.fixture(scope="module")
async def unbroken(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """Four steps of PPO with nothing in between."""
    job = small_job(tmp_path_factory.mktemp("unbroken"), tiny_model, "run", *NOISY)
    await train(job)
    return job


async def test_a_stopped_run_resumes_bit_for_bit_as_an_unbroken_one(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier version wrote less into its checkpoint: one warning says what has changed since, and what was
    not compared."""
    job = small_job(tmp_path, tiny_model, "run", *NOISY)
    await train_and_stop_in(2, job)
    assert steps(job) == [0, 1, 2]
    file = job.run_dir / "global_step_2" / "controller.json"
    state = json.loads(file.read_text())
    assert state["kept_settings"].pop("reward.rules") == "rolemesh"
    del state["kept_settings"]["digest of the prompts' other columns"]
    file.write_text(json.dumps(state))
    await train(job)
    assert_same_end(job, unbroken)
    [warning] = [
        each.getMessage() for each in caplog.records if "is of an earlier version" in each.getMessage()
    ]
    assert "not compared: digest of the prompts' other columns; reward.rules. Its built-in rules" in warning


async def test_grpo_resumes_bit_for_bit_as_an_unbroken_run(tiny_model: Path, tmp_path: Path) -> None:
    """Its directory has `..` behind a link, and so has that of its answers."""
    overrides = ("algorithm.adv_estimator=grpo", "actor.use_kl_loss=true", *NOISY)
    whole = small_job(tmp_path, tiny_model, "whole", *overrides)
    await train(whole)
    (tmp_path / "disk" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "below")
    places = (f"default_local_dir={tmp_path}/link/../run", f"rollout_data_dir={tmp_path}/link/../answers")
    job = small_job(tmp_path, tiny_model, "run", *overrides, *(f"trainer.{place}" for place in places))
    await train_and_stop_in(3, job)
    await train(job)
    assert_same_end(job, whole)
    assert job.run_dir == tmp_path / "disk" / "run"
    assert len(os.listdir(tmp_path / "disk" / "answers")) == 4


def die_in_step_3(job: JobConfig) -> None:
    torch.set_num_threads(1)

    async def run() -> None:
        with workers(job) as roles:
            run = Run(job, load_tokenizer(job.actor.model))
            training = asyncio.create_task(run.train(roles))
            async for _ in run.status.watch(after_step=2):
                os.kill(os.getpid(), signal.SIGKILL)
            await training

    asyncio.run(run())


async def test_a_run_killed_in_a_step_resumes_without_doubling_a_step(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    """It resumes from the last checkpoint, and the metrics hold each step once."""
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=2", "trainer.test_freq=2")
    process = FORKS.Process(target=die_in_step_3, args=(job,))
    process.start()
    assert await exit_codes([process]) == [-signal.SIGKILL]
    assert steps(job) == [0, 1, 2, 3]  # step 3 was recorded, and no checkpoint holds it
    await train(job)
    assert_same_end(job, unbroken)


async def test_roles_begin_anew_after_a_controller_without_checkpoints(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    """The roles outlive the first controller; the next one makes the run from its beginning."""
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=4", "trainer.test_freq=2")
    with workers(job) as roles:
        first = Run(job, load_tokenizer(job.actor.model))
        training = asyncio.create_task(first.train(roles))
        async for _ in first.status.watch(after_step=1):
            training.cancel()
        await asyncio.wait({training})
        assert training.cancelled()
        assert steps(job)[-1] in (2, 3)
        await Run(job, load_tokenizer(job.actor.model)).train(roles)
    assert_same_end(job, unbroken)


async def test_a_run_killed_during_a_commit_uses_the_last_checkpoint(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *NOISY)
    await train_and_stop_in(3, job)
    # what lies on the disk between the record of step 3 and the rename that makes its checkpoint whole
    (job.run_dir / "global_step_3").rename(job.run_dir / "global_step_3.partial")
    (job.run_dir / "latest").write_text("global_step_2\n")
    await train(job)
    assert_same_end(job, unbroken)
    assert not list(job.run_dir.glob("*.partial"))


async def test_resume_path_drops_the_later_steps_and_makes_them_again(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *NOISY)
    await train(job)
    again = small_job(
        tmp_path, tiny_model, "run", *NOISY,
        "trainer.resume_mode=resume_path", f"trainer.resume_from_path={job.run_dir / 'global_step_1'}",
    )  # fmt: skip
    await train(again)
    assert_same_end(again, unbroken)


async def test_a_finished_run_started_again_makes_no_step(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And every resume says in one warning what may have changed: a learning rate, the reward function's code,
    a validation row's ground truth."""
    before = recorded(unbroken)
    (tmp_path / "reward.py").write_text(REWARD.replace("/ 8", "/ 9"))
    rows = pq.read_table(unbroken.data.val_files[0]).to_pylist()
    rows[1]["reward_model"]["ground_truth"] = "5"
    overrides = (
        *(*NOISY, "actor.optim.lr=5e-4", f"reward.custom_reward_function.path={tmp_path / 'reward.py'}"),
        f"data.val_files={write_rows(tmp_path / 'val.parquet', rows)}",
    )
    summary = await train(small_job(unbroken.run_dir.parent, tiny_model, "run", *overrides))
    assert (summary.step, summary.total_steps) == (4, 4)
    assert recorded(unbroken) == before
    [warning] = [each.getMessage() for each in caplog.records if "global_step_4 is" in each.getMessage()]
    assert "other settings: digest of the validation rows from '" in warning
    assert "; digest of the file reward.custom_reward_function.path from '" in warning
    assert "; actor.optim.lr from 0.001 to 0.0005. From here on the new ones hold. Val" in warning
    assert "Validations from here on are of other rows" in warning


async def test_a_finished_run_needs_no_role(unbroken: JobConfig, tiny_model: Path) -> None:
    tokenizer = load_tokenizer(unbroken.actor.model)
    summary = Run(unbroken, tokenizer).finished()
    assert summary is not None
    assert (summary.step, summary.total_steps) == (4, 4)
    assert [record["training/global_step"] for record in summary.records] == steps(unbroken)
    overrides = (*NOISY, "trainer.total_training_steps=5")
    longer = small_job(unbroken.run_dir.parent, tiny_model, "run", *overrides)
    assert Run(longer, tokenizer).finished() is None


async def test_resume_refuses_a_job_with_other_settings_and_names_them(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    overrides = (*NOISY, "data.seed=7", "rollout.seed=8")
    job = small_job(unbroken.run_dir.parent, tiny_model, "run", *overrides)
    with pytest.raises(
        InvalidConfig, match=r"data\.seed is 7 now and was 42; rollout\.seed is 8 now and was 42"
    ):
        await train(job)
    next_day = load_tokenizer(unbroken.actor.model)
    next_day.chat_template = "{{ date_string or '28 Nov' }}" + next_day.chat_template
    with pytest.raises(
        InvalidConfig, match=r"digest of the tokenised prompts is '.* now and was '.*date_string"
    ):
        Run(unbroken, next_day).finished()
    rows = pq.read_table(unbroken.data.train_files[0]).to_pylist()
    rows[3]["reward_model"]["ground_truth"] = "5"  # as many rows with the same prompts
    edited = f"data.train_files={write_rows(tmp_path / 'train.parquet', rows)}"
    job = small_job(unbroken.run_dir.parent, tiny_model, "run", *NOISY, edited)
    with pytest.raises(InvalidConfig, match=r"digest of the prompts' other columns is '.*now and was '"):
        Run(job, load_tokenizer(job.actor.model)).finished()


async def test_a_new_run_does_not_overwrite_an_old_runs_checkpoints(
    unbroken: JobConfig, tiny_model: Path
) -> None:
    job = small_job(unbroken.run_dir.parent, tiny_model, "run", *NOISY, "trainer.resume_mode=disable")
    before = contents(unbroken.run_dir)
    with pytest.raises(InvalidConfig, match="holds checkpoints of steps"):
        await train(job)
    assert contents(unbroken.run_dir) == before


async def test_resume_path_must_be_a_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(
        tmp_path, tiny_model, "run",
        "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'nowhere'}",
    )  # fmt: skip
    with pytest.raises(InvalidConfig, match="nowhere is not a checkpoint"):
        await train(job)


async def test_a_checkpoint_that_does_not_fit_leaves_the_last_good_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=1")
    await train_and_stop_in(1, job)
    good = contents(job.run_dir / "global_step_1")
    with (
        files_of_at_most(100_000),
        pytest.raises(CheckpointFailed, match=r"last good one is .*global_step_1"),
    ):
        await train(job)
    assert Checkpoints(job.run_dir).steps() == [1]
    assert contents(job.run_dir / "global_step_1") == good
    assert (job.run_dir / "latest").read_text() == "global_step_1\n"
    assert not list(job.run_dir.glob("*.partial"))
    assert (await train(job)).step == 4


class OtherDisk(Forwarding[Any]):
    """A role that has another file system at the path of the controller's run directory."""

    async def begin_checkpoint(self, directory: Path) -> None:
        await self._role.begin_checkpoint(directory.parents[1] / "other" / directory.name)

    async def finish_checkpoint(self, directory: Path) -> None:
        await self._role.finish_checkpoint(directory.parents[1] / "other" / directory.name)


class LateDisk(OtherDisk):
    """A role whose files reach the controller's file system later, as if that had cached the names."""

    async def finish_checkpoint(self, directory: Path) -> None:
        await super().finish_checkpoint(directory)
        there = directory.parents[1] / "other" / directory.name
        asyncio.get_running_loop().call_later(0.2, there.rename, directory)


async def test_a_checkpoint_without_a_roles_files_is_not_committed(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    checkpoints = Checkpoints(job.run_dir)
    with workers(job) as roles:
        late = replace(roles, actor=LateDisk(roles.actor), critic=LateDisk(roles.critic))
        async with checkpoints.writing(late, ControllerState(2, {}, {})):
            pass
        assert checkpoints.steps() == [2]
        shutil.rmtree(job.run_dir)
        monkeypatch.setattr(module, "ARRIVES_IN_S", 0)
        for role in ("actor", "critic"):
            apart = replace(roles, **{role: OtherDisk(getattr(roles, role))})
            with pytest.raises(CheckpointFailed, match=rf"the {role} has finished .* no .*/{role}: they have"):
                async with checkpoints.writing(apart, ControllerState(1, {}, {})):
                    pass
            assert checkpoints.latest() is None
            assert checkpoints.steps() == []


class SlowDisk(Forwarding[Actor]):
    """The actor's checkpoints reach the disk when the next update has begun, or the run is at its end."""

    def __init__(self, actor: Actor, last: int) -> None:
        super().__init__(actor)
        self.updates, self.finished, self.last, self.change = 0, 0, last, asyncio.Condition()

    async def update(self, batch: DataProto) -> Metrics:
        async with self.change:
            self.updates += 1
            self.change.notify_all()
        return await self._role.update(batch)

    async def finish_checkpoint(self, directory: Path) -> None:
        async with self.change:
            step = int(directory.parent.name.removeprefix("global_step_").removesuffix(".partial"))
            await self.change.wait_for(lambda: self.updates > step or step == self.last)
        await self._role.finish_checkpoint(directory)
        self.finished += 1


async def test_steps_go_on_while_a_checkpoint_is_written(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, tiny_model, "run", *NOISY)
    with workers(job) as roles:
        actor: Any = SlowDisk(roles.actor, last=4)
        async with asyncio.timeout(120):  # it would wait for ever, if a step waited for the disk
            await Run(job, load_tokenizer(job.actor.model)).train(replace(roles, actor=actor))
    assert actor.finished == 4
    assert_same_end(job, unbroken)


async def test_old_checkpoints_go_only_after_a_new_one_is_durable(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is durable once it is whole and the records of its steps are on disk."""
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
    synced: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").resolve().name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    await train(job)
    commits = [name for name in synced if name in ("metrics.jsonl", "latest.new")]
    assert commits == ["metrics.jsonl", "latest.new"] * 4
    assert Checkpoints(job.run_dir).steps() == [3, 4]
    assert (job.run_dir / "latest").read_text() == "global_step_4\n"


async def test_an_undeletable_checkpoint_fails_no_step_and_goes_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = small_job(tmp_path, tiny_model, "run")
    checkpoints = Checkpoints(job.run_dir, keep=1)
    rmdir = os.rmdir

    def busy(path: Any, *args: Any, **kwargs: Any) -> None:  # as of NFS while a process has a file of it open
        if "global_step_1" in str(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        rmdir(path, *args, **kwargs)

    async def save(step: int) -> list[str]:
        async with checkpoints.writing(roles, ControllerState(step, {}, {})):
            pass
        assert checkpoints.latest() == job.run_dir / f"global_step_{step}"
        return sorted(path.name for path in job.run_dir.glob("global_step_*"))

    with workers(job) as roles:
        assert await save(1) == ["global_step_1"]
        with monkeypatch.context() as nfs:
            nfs.setattr(os, "rmdir", busy)
            assert await save(2) == ["global_step_1.old.partial", "global_step_2"]
            [record] = caplog.records
            assert "global_step_1.old.partial cannot be deleted: [Errno 39]" in record.getMessage()
            # the run goes back, makes step 1 again, and puts aside a second checkpoint of that name
            assert len(await save(1)) == 3
            assert len(await save(2)) == 3
            checkpoints.clear_partial()  # as a start does
        assert await save(3) == ["global_step_3"]


async def test_a_run_stopped_between_saves_writes_a_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", "trainer.save_freq=3")
    await train_and_stop_in(1, job)
    assert Checkpoints(job.run_dir).steps() == [1]
    state = json.loads((job.run_dir / "global_step_1" / "controller.json").read_text())
    assert state["step"] == 1


async def test_the_kl_coefficient_is_part_of_the_checkpoint(unbroken: JobConfig) -> None:
    first, second = (
        json.loads((unbroken.run_dir / f"global_step_{step}" / "controller.json").read_text())
        for step in (1, 2)
    )
    assert first["kl_controller"] != second["kl_controller"]
    record = next(r for r in recorded(unbroken) if r["training/global_step"] == 3)
    assert record["actor/reward_kl_penalty_coeff"] == second["kl_controller"]["value"]
