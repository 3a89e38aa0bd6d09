"""Reward processes that join and leave in the middle of a step change no bit of a run."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from in_process import small_job, train
from membership import Told
from outcomes import outcome, with_reward
from serving import Process, gate, serve_process, served

from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.telemetry import metrics

LOCAL = "127.0.0.1:0"
OVERRIDES = ("trainer.total_training_steps=3", "trainer.save_freq=3", "rollout.n=16")  # 64 rows a step
# Tells that it has come to a row of the training data, counted from 1, and waits there.
STOPPING = """
import os

seen = 0

def compute_score(data_source, solution_str, ground_truth, extra_info, told, doors, stops):
    global seen
    seen += extra_info["split"] == "train"
    if str(seen) in stops.split() and extra_info["split"] == "train":
        with open(told, "wb", buffering=0) as file:
            file.write(b".")
        with open(doors, "rb", buffering=0) as file:
            file.read(1)
    return sum(character.isdigit() for character in solution_str) / 8
"""


async def test_rewards_that_come_and_go_in_the_middle_of_a_step_change_no_bit(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The first waits in a row until the second has joined and is in one of its own; then the first leaves,
    ends what it has and comes back; and the second is killed in the midst of a piece."""
    (tmp_path / "unbroken").mkdir()
    expected = small_job(tmp_path / "unbroken", tiny_model, "run", *OVERRIDES)
    await train(expected)

    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    (tmp_path / "reward.py").write_text(STOPPING)
    retries = metrics.CLIENT_RETRIES.labels("reward", "ComputeScores")._value
    before = retries.get()
    async with AsyncExitStack() as stack:
        names = ("told-1", "doors-1", "told-2", "doors-2")
        told_1, doors_1, told_2, doors_2 = (stack.enter_context(gate(tmp_path / name)) for name in names)

        async def reward(name: str, stops: str) -> Process:
            (tmp_path / name).mkdir()
            gates = {kind: str(tmp_path / f"{kind}-{name}") for kind in ("told", "doors")}
            own = with_reward(job, **gates, stops=stops)
            return await stack.enter_async_context(serve_process("reward", own, tmp_path / name))

        first, second = await asyncio.gather(reward("1", "5"), reward("2", "3 70"))
        members = Told(first.address)
        addresses: dict[str, Any] = {"reward": members}
        for role in ("actor", "rollout", "reference", "critic"):
            addresses[role] = await stack.enter_async_context(served(role, job))

        run = asyncio.create_task(drive(Run(job, load_tokenizer(job.actor.model)), addresses, LOCAL, None))
        await told_1.passed(run)
        members.tell(first.address, second.address)
        await told_2.passed(run)  # within the step: the first one still waits in it
        members.tell(second.address)
        doors_1.open(1)
        doors_2.open(1)
        await told_2.passed(run)
        members.tell(first.address, second.address)
        second.process.kill()
        await run
        assert await second.process.wait() == -9
    assert retries.get() > before
    assert outcome(job) == outcome(expected)
