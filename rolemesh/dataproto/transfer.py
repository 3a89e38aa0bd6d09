"""Copies tensors to a device at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = 16  # bytes; a multiple of every element's size


def on_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors on a device, without waiting for what it computes.

    Those on the CPU go to a GPU as one copy from pinned memory. A copy of each would wait for the GPU: memory
    that is not pinned is copied only when its turn has come.

    Args:
        tensors: on any device.
        device: where they shall be; tensors that are there already stay as they are.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED if tensor.device.type == "cpu" else 0 for tensor in tensors]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    parts = host.split(sizes)  # type: ignore[no-untyped-call]
    for part, tensor in zip(parts, tensors, strict=True):
        if len(part):
            _seen_as(part, tensor).copy_(tensor)
    there = host.to(device, non_blocking=True).split(sizes)  # type: ignore[no-untyped-call]
    return [
        _seen_as(part, tensor) if len(part) else tensor.to(device)
        for part, tensor in zip(there, tensors, strict=True)
    ]


def _seen_as(part: Tensor, like: Tensor) -> Tensor:
    """Return the first bytes of `part` as a tensor of the shape and type of `like`."""
    return part[: like.nbytes].view(like.dtype).view(like.shape)
