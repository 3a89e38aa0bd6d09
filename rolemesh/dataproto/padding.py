"""Pads a batch so that its number of rows is divisible, and removes the padding again."""

from __future__ import annotations

import torch

from rolemesh.dataproto.dataproto import DataProto
from rolemesh.errors import InvalidBatch


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the start until `size_divisor` divides their number.

    Returns the batch and the number of rows added. Raises InvalidBatch for a batch without rows.
    """
    if not len(data):
        raise InvalidBatch("a batch without rows cannot be padded")
    pad_size = -len(data) % size_divisor
    index = torch.arange(len(data) + pad_size) % len(data)
    return (data.select_idxs(index) if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data
