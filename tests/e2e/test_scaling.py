"""Reward processes that join and leave in the middle of a step change no bit of a run."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from in_process import small_job, train
from membership import Listed
from outcomes import outcome
from serving import Process, gate, serve_process, served
from stopping import stopping

from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.telemetry import metrics

LOCAL = "127.0.0.1:0"
OVERRIDES = ("trainer.total_training_steps=3", "trainer.save_freq=3", "rollout.n=16")  # 64 rows a step


@pytest.mark.usefixtures("differing_jobs")
async def test_rewards_that_come_and_go_in_a_step_change_no_bit(tiny_model: Path, tmp_path: Path) -> None:
    """The first waits in a row until the second has joined and is in one of its own; then the first leaves,
    ends what it has and comes back; and the second is killed in the midst of a piece."""
    (tmp_path / "unbroken").mkdir()
    expected = small_job(tmp_path / "unbroken", tiny_model, "run", *OVERRIDES)
    await train(expected)

    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    retries = metrics.CLIENT_RETRIES.labels("reward", "ComputeScores")._value
    before = retries.get()
    async with AsyncExitStack() as stack:
        names = ("reached-1", "release-1", "reached-2", "release-2")
        reached_1, release_1, reached_2, release_2 = (
            stack.enter_context(gate(tmp_path / name)) for name in names
        )

        async def reward(name: str, stops: str) -> Process:
            (tmp_path / name).mkdir()
            own = stopping(job, tmp_path / f"reached-{name}", tmp_path / f"release-{name}", stops)
            return await stack.enter_async_context(serve_process("reward", own, tmp_path / name))

        first, second = await asyncio.gather(reward("1", "5"), reward("2", "3 70"))
        members = Listed(first.address)
        addresses: dict[str, Any] = {"reward": members}
        for role in ("actor", "rollout", "reference", "critic"):
            addresses[role] = await stack.enter_async_context(served(role, job))

        run = asyncio.create_task(drive(Run(job, load_tokenizer(job.actor.model)), addresses, LOCAL, None))
        await reached_1.passed(run)
        members.tell(first.address, second.address)
        await reached_2.passed(run)  # within the step: the first one still waits in it
        members.tell(second.address)
        release_1.open(1)
        release_2.open(1)
        await reached_2.passed(run)
        members.tell(first.address, second.address)
        second.process.kill()
        await run
        assert await second.process.wait() == -9
    assert retries.get() > before
    assert outcome(job) == outcome(expected)
