"""Roles as services on the GPU: PPO steps from end to end, the tests with the mark gpu, and vLLM asleep."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu.workload import CORRECT, ROOT, Scale, Skipped, check, job_of, make_model
from rolemesh.data.arithmetic import write_arithmetic
from rolemesh.models.tiny import make_tiny_model

STEPS = 3
ADDITIONS = Scale(64, 2, 259, 32, 32, 12, 8)
TESTS = (
    "tests/models/test_packing.py",
    "tests/models/test_probe.py",
    "tests/workers/test_parking.py",
    "tests/processes/test_broken_devices.py",
)


def steps(device: str, directory: Path) -> dict[str, Any]:
    """PPO by `rolemesh run`: gRPC, all models on the device, a checkpoint at the end.

    On a CPU there are five processes. On the GPU all roles take turns in one, as processes do not share a GPU.
    """
    from rolemesh.services.processes.launch import launch  # imports every service

    model = make_tiny_model(directory / "model", hidden_size=64)
    write_arithmetic(directory / "data")
    job = job_of(
        directory,
        model,
        ADDITIONS,
        device,
        {
            "placement": {"strategy": "collocate" if device == "cuda" else "standalone"},
            "trainer": {"total_training_steps": STEPS, "save_freq": STEPS, "experiment_name": "gpu"},
        },
    )
    summary = asyncio.run(launch(job))
    check(summary.step == STEPS, f"the run ended at step {summary.step} of {STEPS}")
    check(summary.checkpoint is not None, "no checkpoint was written")
    records = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    norms = [record["actor/grad_norm"] for record in records]
    check(all(math.isfinite(norm) and norm > 0 for norm in norms), f"gradients: {norms}")
    kept = ("timing_s/step", "timing_s/gen", "timing_s/update_actor", "actor/grad_norm", "critic/score/mean")
    return {name: [record[name] for record in records] for name in kept}


def tests(device: str, directory: Path) -> dict[str, Any]:
    """The tests with the mark gpu."""
    if device == "cpu":
        raise Skipped("they need a GPU")
    report = directory / "report.xml"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "gpu", "-p", "no:cacheprovider", *TESTS]
    told = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, capture_output=True, text=True)
    check(told.returncode == 0, told.stdout[-4000:] + told.stderr[-2000:])
    cases = [case.attrib for case in ElementTree.parse(report).iter("testcase")]
    return {
        "output": told.stdout.strip().splitlines()[-1],
        "seconds": {case["name"]: float(case["time"]) for case in cases},
    }


def vllm(device: str, directory: Path) -> dict[str, Any]:
    """vLLM's engine generates, sleeps, frees the device, wakes with new weights and generates."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vllm is not installed in this Python")
    if device == "cpu":
        raise Skipped("on a CPU tests/rollout has it")
    from rolemesh.dataproto import DataProto
    from rolemesh.services.actor.worker import ActorWorker
    from rolemesh.services.rollout.worker import RolloutWorker

    scale = CORRECT[device]
    model = make_model(directory / "model", scale)
    rollout_of = {"name": "vllm", "gpu_memory_utilization": 0.2, "max_num_batched_tokens": 2048}
    job = job_of(directory, model, scale, device, {"rollout": rollout_of})
    shape = scale.rows, scale.prompt
    columns = {
        "prompts": torch.randint(200, shape),
        "prompt_mask": torch.ones(shape, dtype=torch.bool),
        "seeds": torch.arange(shape[0]),
    }

    async def measured() -> dict[str, Any]:
        rollout, actor = RolloutWorker(job), ActorWorker(job)

        async def rows() -> int:
            prompts = DataProto(columns, {}, {"sampling": "train"})
            return sum([len(some) async for some in rollout.generate(prompts)])

        check(await rows() == scale.rows, "not every prompt was answered")
        awake = _used()
        moved, asleep = await rollout.sleep(), _used()
        check(asleep < awake, f"{asleep} of {awake} bytes are used while it sleeps")
        await rollout.wake()
        await rollout.update_weights(await actor.publish_weights(1))
        check(await rows() == scale.rows, "not every prompt was answered after it woke")
        rollout.close()
        actor.close()
        return {"moved_bytes": moved, "used_awake": awake, "used_asleep": asleep}

    return asyncio.run(measured())


def _used() -> int:
    """Bytes of the device that all processes use: the engine's are not this process's."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
