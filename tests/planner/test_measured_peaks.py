"""Peak memory on a GPU, as the planner estimates it and as it was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.workload import SPEED, job_of
from rolemesh.planner.device_specs import GPUS
from rolemesh.planner.memory import role_memory
from rolemesh.planner.shapes import ModelShape

# benchmarks/gpu/workload.py's model for speed: 512 million parameters.
BLOCK = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 5632
TABLE = 32768 * 2048
SHAPE = ModelShape(
    body_parameters=TABLE + 8 * (BLOCK + 2 * 2048) + 2048,
    head_parameters=TABLE,
    multiplied_parameters=8 * BLOCK,
    hidden=2048,
    layers=8,
    heads=32,
    kv_heads=16,
    head_dim=64,
    intermediate=5632,
    vocabulary=32768,
    stored="float32",
)
H200 = replace(GPUS["h200"], memory_bytes=150_109_880_320)
CHECKPOINTING = {"enable_gradient_checkpointing": True}
# Role, keys of its section, and the peak of torch.cuda.max_memory_allocated (make test-gpu, part "peaks").
MEASURED: dict[str, tuple[str, dict[str, Any], int]] = {
    "actor": ("actor", {}, 27_660_620_800),
    "checkpointing": ("actor", {"model": CHECKPOINTING}, 14_385_792_000),
    "activations on the host": (
        "actor",
        {"model": CHECKPOINTING | {"enable_activation_offload": True}},
        13_447_316_480,
    ),
    "moments on the host": ("actor", {"fsdp_config": {"optimizer_offload": True}}, 23_465_999_872),
    "critic": ("critic", {}, 21_960_110_080),
    "reference": ("reference", {}, 4_598_141_952),
    "reference, float32": ("reference", {"model": {"dtype": "float32"}}, 5_487_334_400),
    "rollout": ("rollout", {}, 5_821_420_544),
}


@pytest.mark.parametrize("name", MEASURED)
def test_an_estimated_peak_is_at_or_little_above_the_measured(name: str) -> None:
    role, keys, measured = MEASURED[name]
    job = job_of(Path("run"), Path("model"), SPEED["cuda"], "cuda", {role: keys})
    assert 1 <= role_memory(job, role, {role: SHAPE}, H200).total / measured <= 1.15
