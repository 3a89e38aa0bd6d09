"""What a process of roles sets before CUDA starts, and how a kernel without one order is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sequences import sequence_batch

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.errors import Unsupported
from rolemesh.models.loading import named_weights
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.workers.numerics import allocator_settings, prepare_device
from rolemesh.workers.worker_context import ComputingThread

GROWS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    fills, exact = torch.utils.deterministic.fill_uninitialized_memory, torch.get_float32_matmul_precision()
    allows = torch.backends.cudnn.allow_tf32
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    torch.set_float32_matmul_precision(exact)
    torch.backends.cudnn.allow_tf32 = allows


def job_of(**sections: Any) -> JobConfig:
    return make_job({"trainer": {"device": "cpu"}, **sections})


@pytest.mark.parametrize(
    ("roles", "engine", "environment", "expected"),
    [
        (["actor"], "vllm", {}, GROWS),
        (["critic", "reward"], "vllm", {}, GROWS),
        (["actor", "rollout"], "hf", {}, GROWS),
        (["actor", "rollout"], "vllm", {}, {}),  # vLLM sleeps here
        (["rollout"], "vllm", {}, {}),
        (["reference", "reward"], "vllm", {}, {}),
        (["actor"], "hf", {"PYTORCH_ALLOC_CONF": ""}, {}),
        (["actor"], "hf", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, {}),
    ],
)
def test_segments_expand_where_roles_train_unless_vllm_sleeps(
    roles: Sequence[str], engine: str, environment: dict[str, str], expected: dict[str, str]
) -> None:
    """A setting of the user wins."""
    assert allocator_settings(roles, job_of(rollout={"name": engine}), environment) == expected


@pytest.mark.usefixtures("_as_before")
def test_float32_is_not_tf32_and_determinism_is_the_jobs_choice() -> None:
    torch.set_float32_matmul_precision("high")
    prepare_device(["reference"], job_of())
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    prepare_device(["actor"], job_of(trainer={"device": "cpu", "deterministic": True}))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.usefixtures("_as_before")
async def test_a_deterministic_cpu_update_keeps_its_bits(tiny_model: Path, tmp_path: Path) -> None:
    """A kernel without a fixed order is named."""
    job = job_of(
        data={"train_batch_size": 8, "max_prompt_length": 6, "max_response_length": 10},
        actor={"ppo_mini_batch_size": 8, "model": {"path": str(tiny_model)}},
        trainer={"device": "cpu", "deterministic": True, "default_local_dir": str(tmp_path)},
    )
    plain, ordered = ActorWorker(job), ActorWorker(job)
    await plain.update(sequence_batch(8))
    prepare_device(["actor"], job)
    await ordered.update(sequence_batch(8))
    mine, theirs = (named_weights(worker.model) for worker in (plain, ordered))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for worker in (plain, ordered):
        worker.close()

    thread = ComputingThread("actor")
    twice = torch.tensor([0, 0])
    job_on_thread = thread.submit(lambda: torch.zeros(2).put_(twice, torch.ones(2)))
    with pytest.raises(Unsupported, match=r"trainer\.deterministic is true, but put_ of actor has no"):
        job_on_thread.result()
    thread.shutdown()
