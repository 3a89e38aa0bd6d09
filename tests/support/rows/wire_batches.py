"""Comparison of received batches with the sent ones."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch

from rolemesh.dataproto import DataProto
from rolemesh.v1 import data_pb2
from rolemesh.v1.frame_pb2 import FrameHeader, TensorSpec
from rolemesh.wire.codec import encode
from rolemesh.wire.dtypes import TO_WIRE

DTYPES = sorted(TO_WIRE, key=str)


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def plain(value: Any) -> Any:
    """Convert floats to their bits and name every type, so NaN, -0.0, 1 and True all differ."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("<d", value))
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return (type(value).__name__, value)


def assert_same(back: DataProto, batch: DataProto) -> None:
    assert list(back.tensors) == list(batch.tensors)
    for name, tensor in batch.tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert octets(back[name]) == octets(tensor), name
    assert list(back.non_tensors) == list(batch.non_tensors)
    for name, column in batch.non_tensors.items():
        assert back[name].dtype == column.dtype
        if column.dtype == object:
            assert plain(back[name].tolist()) == plain(column.tolist())
        else:
            assert back[name].tobytes() == column.tobytes()
    assert plain(back.meta_info) == plain(batch.meta_info)


def specs(batch: DataProto) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in FrameHeader.FromString(encode(batch).header).tensors}


def layout(batch: DataProto, name: str) -> str:
    return data_pb2.Layout.Name(specs(batch)[name].layout).removeprefix("LAYOUT_")


def ppo_batch(rows: int = 64, prompt: int = 128, response: int = 384) -> DataProto:
    """Make the batch of an update, in which 39 % of the positions hold a token."""
    generator = torch.Generator().manual_seed(0)
    prompt_lengths = torch.randint(prompt // 4, prompt // 2, (rows, 1), generator=generator)
    response_lengths = torch.randint(1, int(response * 0.79), (rows, 1), generator=generator)
    prompt_mask = torch.arange(prompt) >= prompt - prompt_lengths
    response_mask = torch.arange(response) < response_lengths
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1).long()
    ids = torch.randint(0, 151_643, (rows, prompt + response), generator=generator)

    def per_token() -> torch.Tensor:
        return torch.randn(rows, response, generator=generator).where(response_mask, 0.0)

    return DataProto(
        {
            "input_ids": ids.where(attention_mask.bool(), 151_643),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "old_log_probs": per_token(),
            "advantages": per_token(),
        }
    )
