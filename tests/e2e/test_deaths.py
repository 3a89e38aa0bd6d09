"""A rollout process that is killed, in the middle of its answers or of new weights, changes no bit of a run."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from in_process import small_job, train
from outcomes import outcome, with_reward
from serving import serve_process, served

from rolemesh.models.loading import load_tokenizer
from rolemesh.rpc.contract import ACTOR, WEIGHTS
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.actor.servicer import ActorServicer
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.telemetry import metrics
from rolemesh.weights import manifest, region, service
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore

LOCAL = "127.0.0.1:0"
OVERRIDES = (
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "data.max_response_length=100",
    "rollout.n=4",
)
SLOW = "rollout.max_num_seqs=4"
# Kills a process when so many answers of the training data have been scored: others are still being made.
KILLING = """
import os

scored = 0

def compute_score(data_source, solution_str, ground_truth, extra_info, pid, after):
    global scored
    scored += extra_info["split"] == "train"
    if scored == after:
        os.kill(pid, 9)
    return sum(character.isdigit() for character in solution_str) / 8
"""


class Killing(WeightsServicer):
    """The actor's real service; it kills a process in the middle of the second version's bytes."""

    def __init__(self, store: WeightStore, pid: int) -> None:
        super().__init__(store)
        self.pid, self.num_starts = pid, 0

    async def FetchRange(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.num_starts += request.version == 2
        at = request.offset
        async for frame in super().FetchRange(request, context):
            yield frame
            at += service.FRAME_BYTES
            if request.version == 2 and self.num_starts == 1 and at > request.length // 2:
                os.kill(self.pid, 9)


@pytest.mark.parametrize("moment", ["generation", "weights"])
async def test_a_run_whose_rollout_is_killed_ends_as_the_unbroken_one_to_the_bit(
    moment: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unbroken").mkdir()
    expected = small_job(tmp_path / "unbroken", tiny_model, "run", *OVERRIDES)
    await train(expected)

    # The actor sends over the network, in pieces small enough for a tiny model to have several.
    monkeypatch.setattr(region, "CAN_SHARE", False)
    monkeypatch.setattr(manifest, "PIECE_BYTES", manifest.MIN_PIECE_BYTES)
    monkeypatch.setattr(service, "FRAME_BYTES", manifest.MIN_PIECE_BYTES)
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    retries = metrics.CLIENT_RETRIES.labels("rollout", "Generate")._value
    before = retries.get()
    async with AsyncExitStack() as stack:
        rollouts = []
        # The first one decodes four rows at a time, which changes no bit: most of its rows are still to be made
        # when those of the second one are there.
        for name, config in (
            ("first", small_job(tmp_path, tiny_model, "run", *OVERRIDES, SLOW)),
            ("second", job),
        ):
            (tmp_path / name).mkdir()
            rollouts.append(await stack.enter_async_context(serve_process("rollout", config, tmp_path / name)))
        victim = rollouts[0].process
        if moment == "generation":
            (tmp_path / "reward.py").write_text(KILLING)
            job = with_reward(job, pid=victim.pid, after=20)
        store, actor = WeightStore(), RoleServer({"actor": [ACTOR, WEIGHTS]})
        weights = Killing(store, victim.pid) if moment == "weights" else WeightsServicer(store)
        addresses = {"rollout": [rollout.address for rollout in rollouts], "actor": [await actor.start(LOCAL)]}
        stack.push_async_callback(actor.drain, 0)
        await actor.ready({ACTOR: ActorServicer(ActorWorker(job), store), WEIGHTS: weights})
        for role in ("reference", "critic", "reward"):
            addresses[role] = await stack.enter_async_context(served(role, job))
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, LOCAL, None)
        assert await victim.wait() == -9
    if moment == "generation":
        assert retries.get() > before  # rows were missing
    else:
        assert isinstance(weights, Killing)
        assert weights.num_starts == 2  # the second replica had the rest from the actor
    assert outcome(job) == outcome(expected)
