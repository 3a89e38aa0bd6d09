"""Memory shared with vLLM's worker processes. It transfers weights without a socket, and leaves no file behind.

It does not use /dev/shm, which has 64 MiB in a container by default.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64

# name, dtype, shape, offset in bytes; types that a remote call can serialize
Place = tuple[str, str, list[int], int]


class TensorFile(NamedTuple):
    """The places of tensors in the file. Every process of this user can open `path` while the file is open."""

    path: str
    num_bytes: int
    places: list[Place]


@contextmanager
def tensor_file(tensors: Mapping[str, Tensor]) -> Iterator[TensorFile]:
    """Allocate memory for tensors of these names, dtypes and shapes, until the context is left.

    The memory is released however this process ends.
    """
    places: list[Place] = []
    end = 0
    for name, tensor in tensors.items():
        places.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    file = os.memfd_create("rolemesh-weights", os.MFD_CLOEXEC)
    try:
        os.truncate(file, max(end, 1))
        yield TensorFile(f"/proc/{os.getpid()}/fd/{file}", max(end, 1), places)
    finally:
        os.close(file)


def tensors_in(path: str, num_bytes: int, places: Iterable[Place]) -> dict[str, Tensor]:
    """Return the tensors of a file by name, as views of its memory."""
    memory = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    found = {}
    for name, dtype_name, shape, offset in places:
        dtype: torch.dtype = getattr(torch, dtype_name)
        count = torch.Size(shape).numel() * dtype.itemsize
        found[name] = memory[offset : offset + count].view(dtype).view(shape)
    return found
