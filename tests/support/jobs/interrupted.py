"""Runs that end before their last step, and what they must equal once they have gone on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from in_process import recorded, workers

from rolemesh.config import JobConfig
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.run.loop import Run

NOISY = ("trainer.save_freq=1", "trainer.test_freq=2")


def steps(job: JobConfig) -> list[float | None]:
    return [record["training/global_step"] for record in recorded(job)]


def contents(checkpoint: Path) -> dict[str, bytes]:
    """Every file of a checkpoint, byte for byte."""
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in files}


async def train_and_stop_in(step: int, job: JobConfig) -> None:
    """Ask for the end as soon as step `step - 1` is done; the next one is then running."""
    with workers(job) as roles:
        run = Run(job, load_tokenizer(job.actor.model))
        training = asyncio.create_task(run.train(roles))
        async for record in run.status.watch():
            if record["training/global_step"] == step - 1:
                run.request_stop()
        await training


async def train_and_cancel_after(step: int, job: JobConfig) -> None:
    """End the run at once when step `step` is done. No checkpoint is written for the end."""
    with workers(job) as roles:
        run = Run(job, load_tokenizer(job.actor.model))
        training = asyncio.create_task(run.train(roles))
        async for record in run.status.watch():
            if record["training/global_step"] == step:
                training.cancel()
        await asyncio.wait({training})
        assert training.cancelled()


def assert_same_checkpoint(job: JobConfig, unbroken: JobConfig) -> None:
    """The checkpoints of step 4 have the same bits."""
    written, expected = (contents(each.run_dir / "global_step_4") for each in (job, unbroken))
    assert written.keys() == expected.keys()
    # the data files and reward functions of the two runs lie in different directories; nothing else may differ
    assert [name for name in expected if written[name] != expected[name]] == []


def assert_same_end(job: JobConfig, unbroken: JobConfig) -> None:
    assert recorded(job) == recorded(unbroken)
    assert_same_checkpoint(job, unbroken)
