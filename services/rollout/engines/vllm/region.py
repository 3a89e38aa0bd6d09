"""Memory that vLLM's worker processes see as well: weights go to them without a socket and without a file that
could be left behind. It is not /dev/shm, of which a container has 64 MiB."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64

# name, dtype, shape, offset in bytes: what a remote call can carry
Place = tuple[str, str, list[int], int]


class Region(NamedTuple):
    """Where tensors lie. `path` is good for every process of this user as long as the region is open."""

    path: str
    num_bytes: int
    places: list[Place]


@contextmanager
def shared_region(tensors: Mapping[str, Tensor]) -> Iterator[Region]:
    """Room for tensors of these names, dtypes and shapes, until the context is left. However this process ends,
    nothing of it stays."""
    places: list[Place] = []
    end = 0
    for name, tensor in tensors.items():
        places.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    file = os.memfd_create("rolemesh-weights", os.MFD_CLOEXEC)
    try:
        os.truncate(file, max(end, 1))
        yield Region(f"/proc/{os.getpid()}/fd/{file}", max(end, 1), places)
    finally:
        os.close(file)


def tensors_in(path: str, num_bytes: int, places: Iterable[Place]) -> dict[str, Tensor]:
    """The tensors of a region, by name; they are the region's memory."""
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    found = {}
    for name, dtype_name, shape, offset in places:
        dtype: torch.dtype = getattr(torch, dtype_name)
        count = torch.Size(shape).numel() * dtype.itemsize
        found[name] = memory[offset : offset + count].view(dtype).view(shape)
    return found
