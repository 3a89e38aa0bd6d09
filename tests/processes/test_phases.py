"""A rank is killed or stopped in each phase of a step: its group ends, and later ones reach the same bits."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

import pytest
from actors import WITHOUT_CHECKPOINTING
from ranked import Group, group, serve_rank
from saving import saved
from sequences import sequence_batch

from rolemesh.config.job import JobConfig, make_job
from rolemesh.errors import RoleUnavailable
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import ActorClient, ReferenceClient
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.training import checkpoint
from rolemesh.workers.commands import on_all_ranks

STEPS = 2
KEEPALIVE_S = 2.0
ENDS_S = 60.0  # without its keepalive a stopped rank would hold the group for as long as a collective waits


@dataclass(frozen=True)
class Fall:
    """The signal that a rank gets as it begins a phase for the nth time, counted from 1."""

    phase: str
    nth: int
    rank: int
    signal: Signals


# A phase, and which of its beginnings in a group's life. A group loads the checkpoint of the first step, and
# makes the second one. A step has two mini-batches. The actor is offloaded after it has loaded, and when
# the reference takes its turn. write_rows writes a checkpoint's moments.
PHASES = {
    "load": 1,
    "forward": 1,
    "learn": 2,
    "hold_weights": 1,
    "copy_checkpoint": 1,
    "write_rows": 1,
    "offload": 2,
}
# In each phase one rank is killed, and the other one stopped.
FALLS = [
    fall
    for number, (phase, nth) in enumerate(PHASES.items())
    for fall in (
        Fall(phase, nth, number % 2, SIGKILL),
        Fall(phase, nth, 1 - number % 2, SIGSTOP),
    )
]


def job_of(model: Path, directory: Path) -> JobConfig:
    return make_job(
        {
            "data": {"train_batch_size": 8, "max_prompt_length": 6, "max_response_length": 10},
            "algorithm": {"adv_estimator": "grpo"},
            "actor": {
                "model": {"path": str(model)} | WITHOUT_CHECKPOINTING,
                "ppo_mini_batch_size": 4,
                "ppo_micro_batch_size_per_gpu": 2,
                "optim": {"lr": 1e-3},
                "use_kl_loss": True,
            },
            "rollout": {"n": 2},
            "placement": {"strategy": "split-collocate", "ranks": {"policy": 2}},
            "trainer": {
                "device": "cpu",
                "default_local_dir": str(directory / "run"),
                "total_training_steps": STEPS,
            },
        }
    )


def signalled(fall: Fall, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which signals its process when it is called for the nth time."""
    calls = 0

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fall.nth:
            os.kill(os.getpid(), fall.signal)
        return function(*args, **kwargs)

    return counted


def rank_of(
    model: Path,
    run: Path,
    fall: Fall | None,
    directory: Path,
    environment: Mapping[str, str],
    keepalive_s: float,
) -> None:
    """Serve actor and reference as one rank, which may fall."""
    if fall and int(environment["RANK"]) == fall.rank:
        if fall.phase == "load":
            ActorWorker.__init__ = signalled(fall, ActorWorker.__init__)  # type: ignore[method-assign]
        elif fall.phase == "write_rows":
            checkpoint.write_rows = signalled(fall, checkpoint.write_rows)
        else:
            method = getattr(ActorWorker, fall.phase).__wrapped__
            setattr(ActorWorker, fall.phase, on_all_ranks(signalled(fall, method)))
    serve_rank(["actor", "reference"], job_of(model, run), directory, environment, keepalive_s)


async def train(started: Group, job: JobConfig) -> None:
    """Make the steps that no checkpoint has. Each ends with a checkpoint, committed by its directory's name."""
    async with AsyncExitStack() as stack:
        address = [await started.address()]
        actor = await stack.enter_async_context(ActorClient(address, methods(job), patience_s=0.5))
        reference = await stack.enter_async_context(ReferenceClient(address, methods(job), patience_s=0.5))
        for client in (actor, reference):
            await client.wait_until_ready(120)
        for left in job.run_dir.glob("*.partial"):
            shutil.rmtree(left)  # as the controller does
        done = max([int(path.name) for path in job.run_dir.glob("[0-9]")], default=0)
        await actor.load_checkpoint(job.run_dir / str(done) if done else None)
        for step in range(done + 1, STEPS + 1):
            batch = sequence_batch(16, seed=step)
            await actor.compute_log_probs(batch)
            batch["ref_log_probs"] = (await reference.compute_log_probs(batch))["ref_log_probs"]
            await actor.update(batch)
            await actor.publish_weights(step)
            await saved(actor, job.run_dir / f"{step}.partial")
            (job.run_dir / f"{step}.partial").rename(job.run_dir / str(step))


def end_of(job: JobConfig) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (job.run_dir / str(STEPS)).iterdir()}


async def falls(model: Path, directory: Path, job: JobConfig, fall: Fall) -> str:
    """Train until the rank falls. Return what is wrong."""
    target = functools.partial(rank_of, model, job.run_dir.parent, fall)
    with group(directory, 2, keepalive_s=KEEPALIVE_S, target=target) as started:
        training = asyncio.create_task(train(started, job))
        if fall.signal is SIGKILL:
            assert await started.ended(fall.rank) == [-SIGKILL]
        began = time.monotonic()
        async with asyncio.timeout(ENDS_S if fall.signal is SIGKILL else 2 * ENDS_S):
            codes = await started.ended(1 - fall.rank)
        if fall.signal is SIGSTOP:
            started.kill(fall.rank)
        seconds = time.monotonic() - began
        if fall.phase == "load":
            training.cancel()  # it waits for a role that will not be ready; a launcher sees the process end
        outcome = (await asyncio.gather(training, return_exceptions=True))[0]
        log = started.log(1 - fall.rank)
    problems = {
        f"the other rank ended with {codes} after {seconds:.0f} s": codes != [1],
        f"its log does not name the rank:\n{log}": f"rank {fall.rank} of 2 of actor,reference" not in log,
        f"the calls ended with {outcome!r}": not isinstance(outcome, RoleUnavailable | asyncio.CancelledError),
    }
    wrong = [problem for problem, holds in problems.items() if holds]
    return f"{fall}: {'; '.join(wrong)}" if wrong else ""


async def goes_on(model: Path, directory: Path, whole: JobConfig, falling: Sequence[Fall]) -> list[str]:
    """Make the second step of a run with a group for each fall, and one that ends it. Return what is wrong."""
    job = job_of(model, directory)
    shutil.copytree(whole.run_dir / "1", job.run_dir / "1")
    problems = [await falls(model, directory / str(number), job, fall) for number, fall in enumerate(falling)]
    target = functools.partial(rank_of, model, directory, None)
    with group(directory / "last", 2, target=target) as last:
        await train(last, job)
    return [*problems, "" if end_of(job) == end_of(whole) else f"the bits at the end differ after {falling}"]


@pytest.mark.timeout(900)
async def test_a_rank_killed_in_any_phase_changes_no_final_bit(tiny_model: Path, tmp_path: Path) -> None:
    whole = job_of(tiny_model, tmp_path / "whole")
    target = functools.partial(rank_of, tiny_model, tmp_path / "whole", None)
    with group(tmp_path / "whole" / "ranks", 2, target=target) as started:
        await train(started, whole)
    assert "optimizer.safetensors" in end_of(whole)
    half = len(FALLS) // 2  # two runs at a time: a group has two processes
    problems = await asyncio.gather(
        *(goes_on(tiny_model, tmp_path / str(first), whole, FALLS[first : first + half]) for first in (0, half))
    )
    assert [problem for of_run in problems for problem in of_run if problem] == []
