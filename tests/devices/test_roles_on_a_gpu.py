"""The roles on a pretended GPU: every method keeps CUDA's rules, and attention runs in the right kernel."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_jobs import ROWS, gpu_job
from pretended_gpu import PretendedGpu
from pretended_gpu.tensors import held
from sequences import sequence_batch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.models.loading import named_weights
from rolemesh.planner.shapes import read_shape
from rolemesh.roles import Metrics
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.training.usage import update_flops
from rolemesh.weights.published import PublishedWeights

# Every pair of two keys' values is in one of them: the job's keys, and the kernel of attention.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({}, "varlen"),
    "packed, float32, recomputed": ({"dtype": "float32", "checkpointing": True}, "efficient"),
    "padded, recomputed, by tokens": ({"packed": False, "checkpointing": True, "by_tokens": True}, "efficient"),
    "padded, float32, for vLLM": (
        {"packed": False, "dtype": "float32", "rollout": {"name": "vllm", "dtype": "bfloat16"}},
        "efficient",
    ),
    "packed, by tokens, float32": ({"by_tokens": True, "dtype": "float32"}, "efficient"),
}
ways = pytest.mark.parametrize(("way", "kernel"), WAYS.values(), ids=WAYS)


def check_answer(answer: DataProto, batch: DataProto) -> None:
    """All on the host, 0 where nothing was sampled."""
    assert len(answer) == len(batch)
    for column in answer.tensors.values():
        assert column.device.type == "cpu"
        assert column.isfinite().all()
        assert not column[~batch["response_mask"]].any()


RATES = {"bfloat16": 989e12, "float32": 67e12}  # of the GPU that is pretended


def check_usage(worker: ActorWorker | CriticWorker, metrics: Metrics, batch: DataProto, seconds: float) -> None:
    """The update took no longer than its call: its share of the peak rate is at least the call's."""
    role = worker.role
    flops = update_flops(read_shape(worker.config, role), batch, scores=role == "critic")
    assert metrics[f"perf/mfu/{role}"] >= flops / seconds / RATES[worker.config.dtype]
    suffix = "" if role == "actor" else "/critic"
    assert metrics[f"perf/max_memory_allocated_gb{suffix}"] == 3
    assert metrics[f"perf/max_memory_reserved_gb{suffix}"] == 4


def kernels_of(gpu: PretendedGpu) -> dict[str, int]:
    return gpu.record.names("attention")


@ways
async def test_an_actor_computes_log_probs_learns_and_publishes(
    gpu: PretendedGpu, two_layers: Path, way: dict[str, Any], kernel: str
) -> None:
    batch = sequence_batch(ROWS)
    with gpu.worker(ActorWorker, gpu_job(two_layers, **way)) as worker:
        gpu.record.clear()
        check_answer(await worker.compute_log_probs(batch), batch)
        assert set(kernels_of(gpu)) == {f"{kernel} forward"}
        gpu.record.clear()
        began = time.perf_counter()
        metrics = await worker.update(batch)
        check_usage(worker, metrics, batch, time.perf_counter() - began)
        passes = kernels_of(gpu)
        gpu.record.clear()
        source = await worker.publish_weights(1)
        published = gpu.record.spent()
    assert math.isfinite(metrics["actor/pg_loss"])
    assert set(passes) == {f"{kernel} forward", f"{kernel} backward"}
    recomputed = 2 if way.get("checkpointing") else 1
    assert passes[f"{kernel} forward"] == recomputed * passes[f"{kernel} backward"]
    assert isinstance(source, PublishedWeights)
    version = source.holding.tensors().values()
    assert all(tensor.device.type == "cpu" for tensor in version)
    # Matrices leave the GPU in the type in which the engine holds them.
    assert {x.dtype for x in version if x.dim() > 1} == {torch.bfloat16 if "rollout" in way else torch.float32}
    assert published.to_host_bytes == sum(x.nbytes for x in version)


@ways
async def test_a_critic_computes_values_and_learns(
    gpu: PretendedGpu, two_layers: Path, way: dict[str, Any], kernel: str
) -> None:
    batch = sequence_batch(ROWS)
    with gpu.worker(CriticWorker, gpu_job(two_layers, **way)) as worker:
        gpu.record.clear()
        check_answer(await worker.compute_values(batch), batch)
        began = time.perf_counter()
        metrics = await worker.update(batch)
        check_usage(worker, metrics, batch, time.perf_counter() - began)
    assert math.isfinite(metrics["critic/vf_loss"])
    assert set(kernels_of(gpu)) == {f"{kernel} forward", f"{kernel} backward"}


@ways
async def test_a_references_log_probs_run_in_the_chosen_kernel(
    gpu: PretendedGpu, two_layers: Path, way: dict[str, Any], kernel: str
) -> None:
    """The trial of a model when it is loaded runs this kernel, too."""
    batch = sequence_batch(ROWS)
    gpu.record.clear()
    with gpu.worker(ReferenceWorker, gpu_job(two_layers, **way)) as worker:
        assert f"{kernel} forward" in kernels_of(gpu)
        gpu.record.clear()
        check_answer(await worker.compute_log_probs(batch), batch)
    assert set(kernels_of(gpu)) == {f"{kernel} forward"}


@pytest.mark.parametrize("role", [ActorWorker, CriticWorker])
async def test_a_checkpoint_passes_through_pinned_memory_bit_for_bit(
    gpu: PretendedGpu, two_layers: Path, tmp_path: Path, role: Any
) -> None:
    """Every copy is into a buffer, which the device does not wait for; only the buffers are waited for."""
    job = gpu_job(two_layers, trainer={"default_local_dir": str(tmp_path)})
    with gpu.worker(role, job) as worker:
        await worker.update(sequence_batch(ROWS, seed=1))
        gpu.record.clear()
        await worker.begin_checkpoint(tmp_path / "saved")
        copies, waits = gpu.record.names("to host"), gpu.record.names("wait")
        await worker.finish_checkpoint(tmp_path / "saved")
        kept = of_the_gpu(gpu, worker)
        await worker.update(sequence_batch(ROWS, seed=2))
        await worker.load_checkpoint(tmp_path / "saved")
        back = of_the_gpu(gpu, worker)
    assert set(copies) == {"aten::copy_"}
    assert copies["aten::copy_"] >= len(kept)
    assert waits == {"synchronize": 4}  # two buffers of the weights, and two of the moments
    assert all(torch.equal(kept[name], back[name]) for name in kept)


def of_the_gpu(gpu: PretendedGpu, worker: ActorWorker | CriticWorker) -> dict[str, Tensor]:
    """Copies of the weights and moments that lie there."""
    with gpu.here():
        tensors = named_weights(worker.model) | worker.optimizer.state_tensors()
        return {name: held(x.detach()).clone() for name, x in tensors.items() if x.device.type == "cuda"}
