"""The engine vllm on a GPU asleep and awake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu.vllm_rows import (
    PLAIN,
    ROWS,
    SIZES,
    generated,
    need_vllm,
    prompts_of,
    vllm_job,
    write_model,
)
from benchmarks.gpu.workload import DTYPES, Missed, check, keep
from rolemesh.config import JobConfig
from rolemesh.models.loading import named_weights
from rolemesh.services.rollout.engines import load_engine
from rolemesh.services.rollout.engines.vllm.engine import VllmEngine
from rolemesh.weights.published import PublishedWeights

SHARES = (0.5, 0.9)
ASLEEP_BYTES = 2 * 2**30
WAKE_S = 2.0


def sleep(device: str, directory: Path) -> dict[str, Any]:
    """Sleep and wake at both levels and with two shares of the memory: bytes left, seconds, the same tokens.

    An engine's first sleep copies the weights of the model directory to the host (level 1). After an update the
    host has them, and they are dropped (level 2).
    """
    need_vllm()
    model = write_model(directory / "model", Qwen2Config, SIZES[device], device)
    figures: dict[str, Any] = {}
    for each in SHARES:
        job = vllm_job(model, device, DTYPES[device][-1], gpu_memory_utilization=each)
        figures[f"share {each}"] = {}
        asyncio.run(slept(job, model, figures[f"share {each}"], lambda: keep(directory, figures)))
    wrong = []
    for share, levels in figures.items():
        for level in ("level 1", "level 2", "level 2, new weights"):
            found = levels[level]
            if found["asleep_bytes"] > ASLEEP_BYTES or found["wake_s"] >= WAKE_S or not found["same_tokens"]:
                wrong.append(f"{share} {level}: {found}")
    if wrong:
        raise Missed("; ".join(wrong), figures)
    return figures


async def slept(job: JobConfig, path: Path, figures: dict[str, Any], kept: Callable[[], None]) -> None:
    used = memory_used(job)
    began = time.perf_counter()
    engine = load_engine(job, None)  # type: ignore[arg-type]
    assert isinstance(engine, VllmEngine)
    figures["start_s"] = time.perf_counter() - began
    prompts = prompts_of(ROWS)

    async def rows() -> list[Any]:
        """Of one row at a time: then the same rows share a pass."""
        return [(await generated(engine, prompts[i : i + 1], PLAIN))["responses"].tolist() for i in range(6)]

    before = await rows()
    check(await rows() == before, "one row at a time, the same seeds give other tokens")
    figures["awake_bytes"] = memory_used(job) - used
    dtype = getattr(torch, job.rollout.dtype)
    weights = named_weights(AutoModelForCausalLM.from_pretrained(path, dtype=dtype))
    version = await PublishedWeights(1, weights, dtype=dtype).fetch()

    async def measured(then: Callable[[], Any]) -> dict[str, Any]:
        began = time.perf_counter()
        moved = await engine.sleep()
        asleep = time.perf_counter()
        left = memory_used(job) - used
        woken = time.perf_counter()
        await engine.wake()
        await then()
        awake = time.perf_counter()
        return {
            "sleep_s": asleep - began,
            "moved_bytes": moved,
            "asleep_bytes": left,
            "wake_s": awake - woken,
            "same_tokens": await rows() == before,
            "awake_bytes": memory_used(job) - used,
        }

    async def nothing() -> None:
        await engine._filled()

    figures["level 1"] = await measured(nothing)
    kept()
    began = time.perf_counter()
    await engine.load_weights(1, version)
    figures["load_s"] = time.perf_counter() - began
    check(await rows() == before, "the same weights loaded again give other tokens")
    figures["level 2"] = await measured(nothing)
    kept()
    figures["level 2, new weights"] = await measured(lambda: engine.load_weights(2, version))
    kept()
    figures["level 2, again"] = await measured(lambda: engine.load_weights(3, version))
    engine.close()


def memory_used(job: JobConfig) -> int:
    """Bytes of the GPU in use by all processes, because vLLM's are others. 0 on a CPU."""
    if job.trainer.device == "cpu":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
