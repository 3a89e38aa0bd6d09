"""A rank is killed or stopped in a phase of a step: its group ends, and a new one reaches the same bits."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals
from typing import Any

from ranked import Group, group, serve_rank
from saving import saved
from sequences import sequence_batch

from rolemesh.config.job import JobConfig, make_job
from rolemesh.errors import RoleUnavailable
from rolemesh.roles import methods
from rolemesh.rpc.calling.clients import ActorClient, ReferenceClient
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.training import checkpoint
from rolemesh.workers.commands import command

STEPS = 2
KEEPALIVE_S = 2.0
ENDS_S = 60.0  # without its keepalive a stopped rank would hold the group for as long as a collective waits


@dataclass(frozen=True)
class Fall:
    """When a rank gets a signal: as it begins a phase for the nth time, counted from 1."""

    phase: str
    rank: int
    signal: Signals = SIGKILL
    time: int = 1


# All but the first are in the second of two steps; each step has two mini-batches. The actor parks after it has
# loaded, and in every step when the reference takes its turn. write_rows writes a checkpoint's moments.
CASES = [
    Fall("load", 0),
    Fall("forward", 1, time=2),
    Fall("learn", 0, time=3),
    Fall("hold_weights", 1, time=2),
    Fall("copy_checkpoint", 0, time=2),
    Fall("write_rows", 1, time=2),
    Fall("park", 0, time=3),
    Fall("learn", 1, SIGSTOP, time=4),
]


def job_of(model: Path, directory: Path) -> JobConfig:
    return make_job(
        {
            "data": {"train_batch_size": 8, "max_prompt_length": 6, "max_response_length": 10},
            "algorithm": {"adv_estimator": "grpo"},
            "actor": {
                "model": {"path": str(model)},
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


def falling(fall: Fall, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which signals its process when it is called for the nth time."""
    calls = 0

    @functools.wraps(function)
    def falls(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fall.time:
            os.kill(os.getpid(), fall.signal)
        return function(*args, **kwargs)

    return falls


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
            ActorWorker.__init__ = falling(fall, ActorWorker.__init__)  # type: ignore[method-assign]
        elif fall.phase == "write_rows":
            checkpoint.write_rows = falling(fall, checkpoint.write_rows)
        else:
            method = getattr(ActorWorker, fall.phase).__wrapped__
            setattr(ActorWorker, fall.phase, command(falling(fall, method)))
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


async def falls_and_goes_on(model: Path, directory: Path, fall: Fall, expected: Mapping[str, bytes]) -> str:
    """Train until the rank falls, and with a new group to the end. Return what is wrong."""
    job = job_of(model, directory)
    target = functools.partial(rank_of, model, directory, fall)
    with group(directory / "first", 2, keepalive_s=KEEPALIVE_S, target=target) as first:
        training = asyncio.create_task(train(first, job))
        if fall.signal is SIGKILL:
            assert await first.ended(fall.rank) == [-SIGKILL]
        began = time.monotonic()
        async with asyncio.timeout(ENDS_S if fall.signal is SIGKILL else 2 * ENDS_S):
            codes = await first.ended(1 - fall.rank)
        if fall.signal is SIGSTOP:
            first.kill(fall.rank)
        seconds = time.monotonic() - began
        if fall.phase == "load":
            training.cancel()  # it waits for a role that will not be ready; a launcher sees the process end
        outcome = (await asyncio.gather(training, return_exceptions=True))[0]
        told = first.log(1 - fall.rank)
    again = functools.partial(rank_of, model, directory, None)
    with group(directory / "again", 2, target=again) as second:
        await train(second, job)
    problems = {
        f"the other rank ended with {codes} after {seconds:.0f} s": codes != [1],
        f"its log does not name the rank:\n{told}": f"rank {fall.rank} of 2 of actor,reference" not in told,
        f"the calls ended with {outcome!r}": not isinstance(outcome, RoleUnavailable | asyncio.CancelledError),
        "the bits at the end differ": end_of(job) != expected,
    }
    wrong = [problem for problem, holds in problems.items() if holds]
    return f"{fall}: {'; '.join(wrong)}" if wrong else ""


async def test_a_rank_may_fall_in_any_phase_and_the_bits_at_the_end_are_those_of_an_unbroken_run(
    tiny_model: Path, tmp_path: Path
) -> None:
    whole = job_of(tiny_model, tmp_path / "whole")
    target = functools.partial(rank_of, tiny_model, tmp_path / "whole", None)
    with group(tmp_path / "whole" / "ranks", 2, target=target) as started:
        await train(started, whole)
    expected = end_of(whole)
    assert "optimizer.safetensors" in expected
    problems = []
    for first in range(0, len(CASES), 2):  # two at a time: a group has two processes
        cases = enumerate(CASES[first : first + 2], first)
        problems += await asyncio.gather(
            *(falls_and_goes_on(tiny_model, tmp_path / str(number), fall, expected) for number, fall in cases)
        )
    assert [*filter(None, problems)] == []
