"""What a controller needs of its own disk: tokenizer and configuration of the policy, and no weights."""

from __future__ import annotations

import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from in_process import recorded, small_job, train
from serving import served

from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig, ModelNotFound, NotPermitted, RolemeshError, RoleTaken
from rolemesh.services.controller.job_warnings import warn_of_no_checkpoint
from rolemesh.services.controller.main import checked_run, control
from rolemesh.services.controller.main import train as train_over_grpc
from rolemesh.services.controller.run.run_dir import held, read_metrics
from rolemesh.services.controller.service.controller_server import serving
from rolemesh.services.controller.service.status import RunStatus

LOCAL = "127.0.0.1:0"
OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "trainer.total_training_steps=1",
)


def without_weights(model: Path, to: Path) -> Path:
    return Path(shutil.copytree(model, to, ignore=shutil.ignore_patterns("*.safetensors*")))


@pytest.mark.usefixtures("differing_jobs")  # the roles' model is in another directory
async def test_a_controller_needs_no_weights_of_the_policy(tiny_model: Path, tmp_path: Path) -> None:
    """Its tokenizer and its configuration are enough."""
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    bare = without_weights(tiny_model, tmp_path / "bare")
    own = small_job(tmp_path, bare, "run", *OVERRIDES)
    async with AsyncExitStack() as stack:
        addresses = {role: await stack.enter_async_context(served(role, job)) for role in job.roles}
        server = await stack.enter_async_context(serving(RunStatus("run"), own.roles, LOCAL))
        await control(own, addresses, server)
    assert [record["training/global_step"] for record in read_metrics(own.run_dir / "metrics.jsonl")][-1] == 1


async def test_a_second_controller_ends_with_its_first_call(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    elsewhere = f"trainer.default_local_dir={tmp_path / 'elsewhere'}"
    async with AsyncExitStack() as stack:
        addresses = {role: await stack.enter_async_context(served(role, job)) for role in job.roles}
        server = await stack.enter_async_context(serving(RunStatus("run"), job.roles, LOCAL))
        await control(job, addresses, server)
        for name, error in (("run", RoleTaken), ("other", NotPermitted)):
            second = small_job(tmp_path, tiny_model, name, *OVERRIDES, elsewhere)
            with pytest.raises(error, match=r"actor\.LoadCheckpoint"):
                await control(second, addresses, server)
            assert not list(second.run_dir.glob("global_step_*"))


async def test_a_trial_changes_no_bit_of_the_run_after_it(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `helm test` does. Its run directory is another, and it begins a term in the roles' own.

    It does not warn that it saves nothing; the run does.
    """
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    alone = small_job(tmp_path, tiny_model, "alone", *OVERRIDES)
    elsewhere = (f"trainer.default_local_dir={tmp_path / 'trial'}", "trainer.resume_mode=disable")
    trial = small_job(tmp_path, tiny_model, "run", *OVERRIDES, *elsewhere)
    await train(alone)
    async with AsyncExitStack() as stack:
        addresses = {role: await stack.enter_async_context(served(role, job)) for role in job.roles}
        server = await stack.enter_async_context(serving(RunStatus("run"), job.roles, LOCAL))
        with held(job.run_dir), pytest.raises(RolemeshError, match="run is the directory of a running run"):
            await control(trial, addresses, server, roles_of=tmp_path / "trial" / ".." / "run")
        (tmp_path / "link").symlink_to(tmp_path)
        await control(trial, addresses, server, roles_of=tmp_path / "link" / "run")
        with pytest.raises(InvalidConfig, match="no address was given"):  # and not: of a running run, its own
            await control(job, {}, server, roles_of=tmp_path / "link" / "run")
        assert not (job.run_dir / "metrics.jsonl").exists()
        assert "no checkpoint will be written" not in caplog.text
        await control(job, addresses, server)
    assert caplog.text.count("no checkpoint will be written") == 1
    assert recorded(job) == recorded(alone)
    assert recorded(trial) == recorded(alone)


@pytest.mark.parametrize(
    ("trainer", "warned"),
    [
        ({}, True),
        ({"save_freq": 0}, True),
        ({"save_freq": 5}, False),
        ({"save_best": "val-core/x/reward/mean@1", "test_freq": 5}, False),
        ({"val_only": True}, False),
    ],
)
def test_a_run_that_trains_and_saves_nothing_is_warned_of(
    trainer: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_no_checkpoint(make_job({"trainer": trainer}))
    assert ("no checkpoint will be written" in caplog.text) is warned


@pytest.mark.parametrize(("warmup", "warned"), [(2, False), (3, True), (4, True)])
async def test_a_run_that_is_all_critic_warmup_is_warned_of(
    warmup: int, warned: bool, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And no trial of such a job, which makes fewer steps than the run."""
    length = ("trainer.total_training_steps=3", f"trainer.critic_warmup={warmup}")
    run = await checked_run(small_job(tmp_path, tiny_model, "run", *length))
    async with serving(run.status, run.job.roles, LOCAL) as server:
        for roles_of in (None, tmp_path / "run"):
            caplog.clear()
            with pytest.raises(InvalidConfig, match="no address was given"):
                await train_over_grpc(run, {}, server, None, roles_of=roles_of)
            words = (
                f"trainer.critic_warmup is {warmup}, and the run has 3 steps, so none of them trains the actor"
            )
            assert (words in caplog.text) is (warned and roles_of is None)


async def test_an_unknown_vocabulary_fails_before_any_role_is_called(tiny_model: Path, tmp_path: Path) -> None:
    bare = without_weights(tiny_model, tmp_path / "bare")
    job = small_job(tmp_path, bare, "run", *OVERRIDES)
    (bare / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(ModelNotFound, match="cannot read the vocabulary size of"):
        await checked_run(job)
    (bare / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        await checked_run(job)
    async with serving(RunStatus("run"), job.roles, LOCAL) as server:
        with pytest.raises(ModelNotFound, match=r"has no config\.json"):  # and not: no address was given
            await control(job, {}, server)
