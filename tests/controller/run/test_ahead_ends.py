"""Generation that runs ahead of training: how it ends, well or badly."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from in_process import recorded, small_job
from observed import ASYNC, NO_CRITIC, Observed, in_process, run

from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidConfig, RewardFailed, RoleFailed
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Metrics, Rollout
from rolemesh.services.controller.run.ahead import Ahead
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.stages.experience import fan_out
from rolemesh.weights.weight_source import WeightSource


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """No task goes on, and no error of one is forgotten."""
    before, forgotten = asyncio.all_tasks(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: forgotten.append(context))
    yield
    assert asyncio.all_tasks() == before
    gc.collect()
    await asyncio.sleep(0)
    assert forgotten == []


def job_of_five(directory: Path, model: Path, *overrides: str) -> JobConfig:
    return small_job(
        directory, model, "run", ASYNC, *NO_CRITIC, "trainer.max_staleness=2",
        "trainer.total_training_steps=5", "trainer.save_freq=5", *overrides,
    )  # fmt: skip


async def test_a_stopped_run_begins_nothing_more_and_resumes(tiny_model: Path, tmp_path: Path) -> None:
    job = job_of_five(tmp_path, tiny_model)

    async with nothing_left(), in_process(job) as roles:
        stopped = Run(job, load_tokenizer(job.actor.model))

        class Stopping(Observed):
            async def update(self, batch: DataProto) -> Metrics:
                if len(self.batches) == 1:
                    stopped.request_stop()  # in step 2; steps 3 and 4 are begun
                return await super().update(batch)

        observed = Stopping(roles)
        assert (await stopped.train(observed.watched())).step == 2
    ended = {event.removesuffix(" generated").removesuffix(" closed") for event in observed.events}
    assert [event for event in observed.begun if "step 0" not in event] == [
        f"step {step} begins" for step in (1, 2, 3, 4)
    ]
    assert {event.removesuffix(" begins") for event in observed.begun} <= ended

    async with nothing_left(), in_process(job) as roles:
        again = Observed(roles)
        await run(job, again.watched())
    assert again.begun == [f"step {step} begins" for step in (3, 4, 5)]  # what was made ahead is made anew
    assert (again.batches[0]["weight_versions"][again.batches[0]["response_mask"]] == 2).all()
    assert [record["training/global_step"] for record in recorded(job)] == [0, 1, 2, 3, 4, 5]


async def test_an_error_in_a_step_ends_what_runs_ahead(tiny_model: Path, tmp_path: Path) -> None:
    job = job_of_five(tmp_path, tiny_model)
    second = PromptOrder(10, job.data).rows(2).tolist()
    first = PromptOrder(10, job.data).rows(1).tolist()
    only = next(index for index in second if index not in first)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    return 1 / (extra_info['index'] - {only})\n"
    )
    async with nothing_left(), in_process(job) as roles:
        observed = Observed(roles)
        with pytest.raises(RewardFailed, match=f"train-{only:06d}"):
            await run(job, observed.watched())
    assert len(observed.batches) == 1
    assert len([event for event in observed.events if event.endswith((" generated", " closed"))]) == len(
        observed.begun
    )


async def test_an_error_ahead_is_raised_in_the_step_that_needs_it(tiny_model: Path, tmp_path: Path) -> None:
    """The error ends the generation of step 3's rows; steps 1 and 2 are made."""
    job = job_of_five(tmp_path, tiny_model, "trainer.max_staleness=1")

    class Broken(Observed):
        async def generate(self, prompts: DataProto) -> AsyncGenerator[DataProto]:
            async for rows in super().generate(prompts):
                yield rows
                if prompts.meta_info["step"] == 3:
                    raise RoleFailed("the third is one too many")

    async with nothing_left(), in_process(job) as roles:
        observed = Broken(roles)
        with pytest.raises(RoleFailed, match="the third"):
            await run(job, observed.watched())
    assert len(observed.batches) == 2
    assert recorded(job)[-1]["training/global_step"] == 2


async def test_a_run_that_is_cancelled_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    job = job_of_five(tmp_path, tiny_model)
    async with nothing_left(), in_process(job) as roles:
        observed = Observed(roles)
        running = asyncio.create_task(run(job, observed.watched()))
        await observed.seen("step 3 begins")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len([event for event in observed.events if event.endswith((" generated", " closed"))]) == len(
        observed.begun
    )


async def test_a_token_of_weights_that_are_not_in_use_ends_the_run(tiny_model: Path, tmp_path: Path) -> None:
    """As from a replica that was restarted behind everybody's back."""
    job = small_job(tmp_path, tiny_model, "run", *NO_CRITIC)

    class Forgetful(Observed):
        async def update_weights(self, source: WeightSource) -> None:
            if source.version < 2:
                await super().update_weights(source)

    async with nothing_left(), in_process(job) as roles:
        observed = Forgetful(roles)
        with pytest.raises(RoleFailed, match=r"tokens for step 3 were generated by weights \[1\]"):
            await run(job, observed.watched())
    assert len(observed.batches) == 2


async def test_other_rows_than_were_begun_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    job = small_job(tmp_path, tiny_model, "run", *NO_CRITIC)
    data = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))

    def rows(step: int, n: int = 2, seed: int = 42) -> DataProto:
        return fan_out(data.batch(range(4)), n, seed, step)

    async with nothing_left(), in_process(job) as roles:
        rollout: Rollout = Ahead(roles.rollout, lambda step, sampling: rows(step), 1)
        async with aclosing(cast(Ahead, rollout)):
            with pytest.raises(InvalidConfig, match=r"step 1 .* 12 rows .* the 8 of .* rollout.mode to sync"):
                await anext(aiter(rollout.generate(rows(1, n=3))))
            assert sum([len(part) async for part in rollout.generate(rows(1))]) == 8
            with pytest.raises(InvalidConfig, match=r"step 2 .* 8 rows .* the 8 of"):
                await anext(aiter(rollout.generate(rows(2, seed=43))))
