"""Runs with conversations have the same bits wherever their roles are, and whatever dies in the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from echoing import PLUGIN, TALKS
from fatal import FatalEcho
from in_process import recorded, small_job, train
from launched import rolemesh, written
from outcomes import outcome
from serving import serve_process, served, train_over_grpc

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config import JobConfig
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.main import drive
from rolemesh.services.controller.run.loop import Run
from rolemesh.telemetry import metrics

LOCAL = "127.0.0.1:0"
OVERRIDES = (*TALKS, "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=2")
# Of the tables these two. Each role alone, as in `standalone`: in "three environments" and in all deaths below.
PLACEMENTS = {name: [f"placement.strategy={name}"] for name in ("collocate", "hybrid")} | {
    "three environments": ["placement.replicas.environment=3", "placement.replicas.rollout=2"],
    "0 steps ahead": ["placement.replicas.environment=2", "rollout.mode=async", "trainer.max_staleness=0"],
}


@pytest.fixture(scope="module")
async def unbroken(talkative_model: Path, tmp_path_factory: pytest.TempPathFactory) -> JobConfig:
    """The run in one process."""
    job = small_job(tmp_path_factory.mktemp("unbroken"), talkative_model, "run", *OVERRIDES)
    await train(job)
    assert recorded(job)[-1]["conversation/turns/mean"] > 1  # type: ignore[operator]
    return job


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_conversations_over_grpc_equal_in_process_bit_for_bit(
    unbroken: JobConfig, placement: str, talkative_model: Path, tmp_path: Path
) -> None:
    profiled = placement == "hybrid"  # every operation of a step is traced, which takes seconds
    overrides = (*OVERRIDES, *PLACEMENTS[placement], f"trainer.profile_steps={[2] if profiled else []}")
    job = small_job(tmp_path, talkative_model, "run", *overrides)
    await train_over_grpc(job)
    assert outcome(job) == outcome(unbroken)
    if not profiled:
        return
    drawn = json.loads((job.run_dir / "profile" / "step_2" / "timeline.json").read_text())["traceEvents"]
    names = {event["name"] for event in drawn}
    assert "environment.act" in names, sorted(names)  # how long a turn waited for its tools


@pytest.mark.usefixtures("soon_gone")
@pytest.mark.parametrize(
    ("role", "call"),
    [("environment", "begin"), ("environment", "act"), ("environment", "close"), ("rollout", "act")],
)
@pytest.mark.usefixtures("differing_jobs")
async def test_a_death_in_the_middle_of_conversations_changes_no_bit(
    unbroken: JobConfig, role: str, call: str, talkative_model: Path, tmp_path: Path
) -> None:
    job = small_job(tmp_path, talkative_model, "run", *OVERRIDES)
    lost_before = metrics.EPISODES_LOST._value.get()
    async with AsyncExitStack() as stack:
        # Of two replicas of the role, one is a process that is killed.
        (tmp_path / "victim").mkdir()
        (tmp_path / "environment").mkdir()
        fatal = FatalEcho(tmp_path, call, after=5, whom="itself")
        if role == "rollout":
            victim = await stack.enter_async_context(serve_process("rollout", job, tmp_path / "victim"))
            fatal = FatalEcho(tmp_path, call, after=5, whom=str(victim.process.pid))
        killing = job.model_copy(update={"plugins": [str(fatal.written())]})
        environment = await stack.enter_async_context(
            serve_process("environment", killing, tmp_path / "environment")
        )
        addresses = {}
        for other in job.roles:
            addresses[other] = await stack.enter_async_context(served(other, job))
        if role == "rollout":
            addresses["rollout"] = [victim.address, *addresses["rollout"]]
            addresses["environment"] = [environment.address]
        else:
            victim = environment
            addresses["environment"] = [environment.address, *addresses["environment"]]
        await drive(Run(job, load_tokenizer(job.actor.model)), addresses, LOCAL, None)
        assert await victim.process.wait() == -9
    assert fatal.done.exists()
    # Each of them once: no more than the 11 that a step and a validation hold at a time.
    lost = metrics.EPISODES_LOST._value.get() - lost_before
    assert 1 <= lost <= 11 if role == "environment" else lost == 0
    assert outcome(job) == outcome(unbroken)


@pytest.fixture
def killing(tmp_path: Path) -> Iterator[FatalEcho]:
    forget(str(PLUGIN))  # of an earlier test: both declare the agent `echo`
    fatal = FatalEcho(tmp_path, "act", after=16, whom="launcher")
    yield fatal
    forget(str(fatal.file))


async def test_a_controller_killed_in_a_conversation_keeps_its_bits(
    killing: FatalEcho, talkative_model: Path, tmp_path: Path
) -> None:
    overrides = (*OVERRIDES, "trainer.save_freq=1", f"plugins=[{killing.written()}]")
    killing.done.touch()
    whole = small_job(tmp_path, talkative_model, "whole", *overrides)
    await train(whole)

    killing.done.unlink()
    job = small_job(tmp_path, talkative_model, "run", *overrides)
    async with rolemesh("run", written(job, tmp_path)) as launched:
        code, output = await launched.end()
    assert code == -9, output
    assert 1 <= len(recorded(job)) < len(recorded(whole))
    async with rolemesh("run", written(job, tmp_path)) as again:
        code, output = await again.end()
    assert code == 0, output
    assert outcome(job) == outcome(whole)
