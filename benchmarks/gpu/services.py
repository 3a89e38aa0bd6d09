"""Roles as services on the GPU: PPO steps from end to end, and the tests with the mark gpu."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.workload import ROOT, Scale, Skipped, check, job_of
from rolemesh.models.tiny import make_tiny_model
from rolemesh.services.command_line.arithmetic import write_arithmetic

STEPS = 3
ADDITIONS = Scale(64, 2, 259, 32, 32, 12, 8)
TESTS = (
    "tests/models/test_packing.py",
    "tests/models/test_probe.py",
    "tests/workers/test_offloading.py",
    "tests/weights/test_weights.py",
    "tests/dataproto/test_transfer.py",
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
    ended = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, capture_output=True, text=True)
    check(ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:])
    cases = [case.attrib for case in ElementTree.parse(report).iter("testcase")]
    return {
        "output": ended.stdout.strip().splitlines()[-1],
        "seconds": {case["name"]: float(case["time"]) for case in cases},
    }
