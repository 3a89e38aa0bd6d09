"""Operations of an update by hand, and what is reported of which device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import tensor

from rolemesh.config.model import PolicyModelConfig
from rolemesh.dataproto import DataProto
from rolemesh.planner.device_specs import CUDA_NAMES, GPUS, peak_flops
from rolemesh.planner.shapes import ModelShape
from rolemesh.training.usage import PEAK_BYTES, GpuUsage, update_flops

SHAPE = ModelShape(
    body_parameters=200,
    head_parameters=0,
    multiplied_parameters=100,
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=16,
    vocabulary=10,
)
# A row with a context of 5 tokens, and one with contexts of 2 and 3; 5 of the responses' tokens were sampled.
BATCH = DataProto(
    {
        "attention_mask": tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
        "position_ids": tensor([[0, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 7]]),  # of padding nothing counts
        "response_mask": tensor([[True, True, True], [True, True, False]]),
    }
)
ATTENTION = 6 * 2 * 2 * 4 * (25 + 4 + 9)


def test_the_operations_of_an_update_by_hand() -> None:
    assert update_flops(SHAPE, BATCH) == 6 * 100 * 10 + 6 * 8 * 10 * 5 + ATTENTION
    assert update_flops(SHAPE, BATCH, scores=True) == 6 * 100 * 10 + 6 * 8 * 5 + ATTENTION
    below = 4 * (100 * 10 + 8 * 10 * 5)
    assert update_flops(SHAPE, BATCH, adapter=7) == below + 6 * 7 * 10 + ATTENTION


@pytest.mark.parametrize("name", ["", "NVIDIA H100 PCIe", "NVIDIA H20", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"])
def test_a_gpu_whose_rate_is_not_known_has_none(name: str) -> None:
    assert peak_flops(name, "bfloat16") is None


def test_the_peak_rate_is_the_data_sheets() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") == 67e12
    assert set(CUDA_NAMES.values()) == set(GPUS)


def test_a_role_on_a_cpu_reports_nothing(tiny_model: Path) -> None:
    model = PolicyModelConfig(path=str(tiny_model), dtype="float32")
    usage = GpuUsage("actor", model, torch.device("cpu"), num_ranks=1, epochs=1)
    answer = DataProto()
    with usage.measured(BATCH) as used:
        assert usage.seen([usage.noted(answer)]) == [answer]
    assert used == {}
    assert PEAK_BYTES not in answer.meta_info
