"""Batches whose number of rows must divide."""

from __future__ import annotations

import torch

from rolemesh.dataproto.dataproto import DataProto
from rolemesh.errors import InvalidBatch


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeats rows from the start until the length divides. Returns the batch and the number added."""
    if not len(data):
        raise InvalidBatch("a batch without rows cannot be padded")
    pad_size = -len(data) % size_divisor
    index = torch.arange(len(data) + pad_size) % len(data)
    return (data.select_idxs(index) if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Takes the last `pad_size` rows off again."""
    return data[: len(data) - pad_size] if pad_size else data
