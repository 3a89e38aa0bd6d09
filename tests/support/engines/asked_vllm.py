"""What tests ask vLLM's worker processes besides what the engine asks them; imported there."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import sys
import weakref
from typing import Any

from torch import Tensor

from rolemesh.services.rollout.engines.vllm.extension import LIBC, RolloutExtension


class AskedExtension(RolloutExtension):
    """The engine's extension, and questions about this process."""

    _packed: list[weakref.ref[Any]]

    def process_id(self) -> int:
        return os.getpid()

    def limit_files(self, num_bytes: int) -> None:
        """Let no file of this process grow beyond num_bytes, as if the disk were full.

        Python writes no bytecode from then on: a cache file cut at the limit would break later imports.
        """
        sys.dont_write_bytecode = True
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    def resident_bytes(self) -> int:
        """Count the bytes of parameters, buffers and KV cache that are in memory.

        Only whole pages count: a storage shares its first and last page with other memory.
        """
        return sum(map(_resident_bytes, [*self._storages(), *self.model_runner.kv_caches]))

    def watch_packed(self) -> int:
        """Return the number of layers that have a packed copy of their weight."""
        self._packed = [weakref.ref(layer.cpu_linear) for layer in self._packed_layers()]
        return len(self._packed)

    def num_packed(self) -> int:
        """Return how many of the watched copies are still held."""
        return sum(copy() is not None for copy in self._packed)


def _resident_bytes(tensor: Tensor) -> int:
    storage, page = tensor.untyped_storage(), mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    num_pages = max(0, storage.data_ptr() + storage.nbytes() - start) // page
    in_memory = (ctypes.c_ubyte * num_pages)()
    if num_pages and LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(num_pages * page), in_memory):
        raise OSError("mincore refuses the memory of a tensor")
    return page * sum(flags & 1 for flags in in_memory)
