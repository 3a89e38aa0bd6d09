"""A rollout process that is killed, in the middle of its answers or of new weights, changes no bit of a run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from in_process import small_job, train
from outcomes import outcome
from serving import Gate, gate, serve_process, served

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config import JobConfig
from rolemesh.fingerprint import fingerprint
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
# Engine hf, which in step 2 answers one row of a call, tells that it has, and answers no more.
FALTERING = """
import asyncio

import torch

from rolemesh.plugins import engine

@engine("faltering")
def faltering(job, worker):
    from rolemesh.services.rollout.engines.hf import HfEngine

    class Faltering(HfEngine):
        async def generate(self, prompts, sampling):
            falters = prompts.meta_info["sampling"] == "train" and self.version == 1
            async for rows in super().generate(prompts, sampling):
                if not falters:
                    yield rows
                    continue
                yield rows.select_idxs(torch.tensor([0]))
                with open({faltered!r}, "wb", buffering=0) as faltered:
                    faltered.write(b".")
                await asyncio.get_running_loop().create_future()

    return Faltering(job, worker)
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


@pytest.fixture(scope="module")
async def unbroken(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """The run without a death, in one process."""
    job = small_job(tmp_path_factory.mktemp("unbroken"), tiny_model, "run", *OVERRIDES)
    await train(job)
    return job


@pytest.fixture
def faltering(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[JobConfig, Gate]]:
    """A job with the engine that falters, and where it reports that it does."""
    plugin = tmp_path / "faltering.py"
    with gate(tmp_path / "faltered") as faltered:
        plugin.write_text(FALTERING.format(faltered=str(faltered.path)))
        overrides = (*OVERRIDES, f"plugins=[{plugin}]", "rollout.name=faltering")
        yield small_job(tmp_path, tiny_model, "run", *overrides), faltered
    forget(str(plugin))


@pytest.mark.usefixtures("differing_jobs")
async def test_a_rollout_killed_while_generating_changes_no_bit(
    unbroken: JobConfig, faltering: tuple[JobConfig, Gate], tiny_model: Path, tmp_path: Path
) -> None:
    of_victim, falters = faltering
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    retries = metrics.CLIENT_RETRIES.labels("rollout", "Generate")._value
    before = retries.get()
    async with AsyncExitStack() as stack:
        victim = await stack.enter_async_context(serve_process("rollout", of_victim, tmp_path))
        addresses = {role: await stack.enter_async_context(served(role, job)) for role in job.roles}
        addresses["rollout"] = [victim.address, *addresses["rollout"]]
        run = Run(job, load_tokenizer(job.actor.model))
        training = asyncio.create_task(drive(run, addresses, LOCAL, None))
        await falters.passed(training)
        victim.process.kill()
        await training
        assert await victim.process.wait() == -9
    assert retries.get() > before  # rows were missing
    assert outcome(job) == outcome(unbroken)


async def test_a_rollout_killed_while_receiving_weights_changes_no_bit(
    unbroken: JobConfig, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The actor sends over the network, in pieces small enough for a tiny model to have several.
    monkeypatch.setattr(region, "CAN_SHARE", False)
    monkeypatch.setattr(manifest, "PIECE_BYTES", manifest.MIN_PIECE_BYTES)
    monkeypatch.setattr(service, "FRAME_BYTES", manifest.MIN_PIECE_BYTES)
    job = small_job(tmp_path, tiny_model, "run", *OVERRIDES)
    async with AsyncExitStack() as stack:
        victim = await stack.enter_async_context(serve_process("rollout", job, tmp_path))
        store, metadata = WeightStore(), fingerprint(job, "actor").to_metadata()
        actor = RoleServer({"actor": [ACTOR, WEIGHTS]}, fingerprints={"actor": metadata})
        weights = Killing(store, victim.process.pid)
        addresses = {"actor": [await actor.start(LOCAL)]}
        stack.push_async_callback(actor.drain, 0)
        await actor.ready({ACTOR: ActorServicer(ActorWorker(job), store), WEIGHTS: weights})
        for role in ("rollout", "reference", "critic", "reward"):
            addresses[role] = await stack.enter_async_context(served(role, job))
        addresses["rollout"] = [victim.address, *addresses["rollout"]]
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, LOCAL, None)
        assert await victim.process.wait() == -9
    assert weights.num_starts == 2  # the second replica had the rest from the actor
    assert outcome(job) == outcome(unbroken)
