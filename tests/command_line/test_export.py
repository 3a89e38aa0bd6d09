"""`rolemesh export`: from a run to a directory that anyone can load, and back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from full_disk import files_of_at_most
from in_process import small_job, train
from in_process_commands import rolemesh
from torch import Tensor
from transformers import AutoModelForCausalLM

from rolemesh.config import JobConfig
from rolemesh.models.loading import named_weights
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.weights.published import PublishedWeights


def published(job: JobConfig, checkpoint: Path) -> dict[str, Tensor]:
    """What rollouts get from an actor with a checkpoint."""

    async def fetched() -> dict[str, Tensor]:
        worker = ActorWorker(job)
        await worker.load_checkpoint(checkpoint)
        source = await worker.publish_weights(1)
        assert isinstance(source, PublishedWeights)
        return {name: tensor.clone() for name, tensor in (await source.fetch()).items()}

    return asyncio.run(fetched())


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[JobConfig, Path]:
    """A run of an adapter, with checkpoints of steps 1 and 2."""
    directory = tmp_path_factory.mktemp("runs")
    lora = ("actor.model.lora_rank=4", "trainer.total_training_steps=2", "trainer.save_freq=1")
    job = small_job(directory, tiny_model, "run", *lora)
    asyncio.run(train(job))
    return job, directory / "run"


def test_an_exported_run_has_the_weights_of_its_rollouts(run: tuple[JobConfig, Path], tmp_path: Path) -> None:
    job, directory = run
    exported = {}
    for step in ("1", "latest"):
        answer = rolemesh("export", directory, tmp_path / step, "--checkpoint", step)
        assert (answer.returncode, answer.stderr) == (0, "")
        assert "Read again, it gives the same logits" in answer.stdout
        exported[step] = named_weights(AutoModelForCausalLM.from_pretrained(tmp_path / step))
    for step, name in (("1", "global_step_1"), ("latest", "global_step_2")):
        weights = published(job, directory / name / "actor")
        assert weights.keys() == exported[step].keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in exported[step].items())
    assert not torch.equal(*(e["model.layers.0.mlp.up_proj.weight"] for e in exported.values()))


def test_training_goes_on_from_an_export(run: tuple[JobConfig, Path], tmp_path: Path) -> None:
    """All roles load it; the first KL against the reference, which is the export too, is 0."""
    answer = rolemesh("export", run[1] / "global_step_2", tmp_path / "model", "--max-shard-size", "200KB")
    assert answer.returncode == 0, answer.stderr
    one = "trainer.total_training_steps=1"
    summary = asyncio.run(train(small_job(tmp_path, tmp_path / "model", "next", one)))
    first = next(record for record in summary.records if "actor/reward_kl_penalty" in record)
    assert first["actor/reward_kl_penalty"] == 0


def test_the_critic_of_a_checkpoint_is_one_too(run: tuple[JobConfig, Path], tmp_path: Path) -> None:
    answer = rolemesh("export", run[1], tmp_path / "critic", "--role", "critic", "--dtype", "bfloat16")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "in bfloat16" in answer.stdout


@pytest.mark.parametrize(
    ("source", "more", "said"),
    [
        (
            "run",
            ["--checkpoint", "best"],
            "found no model of role actor in its checkpoint 'best'; it has checkpoints",
        ),
        ("run", ["--checkpoint", "7"], "it has checkpoints of steps [1, 2]"),
        ("run", ["--role", "reward"], "found no model of role reward"),
        ("absent", [], "it has no checkpoints. Expected a run, a checkpoint, or a directory"),
    ],
)
def test_what_is_not_there_is_said(
    run: tuple[JobConfig, Path], tmp_path: Path, source: str, more: list[str], said: str
) -> None:
    answer = rolemesh("export", run[1].parent / source, tmp_path / "out", *more)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the same writes fail."""
    with files_of_at_most(100 * 1024):
        answer = rolemesh("export", tiny_model, tmp_path / "out", width=1000)
    assert answer.returncode == 1, answer.stderr
    [line] = answer.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / 'out'} could not be written: ")
    assert "bytes free" in line
    assert not list(tmp_path.iterdir())
