"""Copies bytes between a region and a GPU, through pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from rolemesh.ranks.sharding import memory_of
from rolemesh.weights.manifest import aligned
from rolemesh.weights.region import num_threads

# Large next to the start of a copy. Pinned blocks stay with torch, so the next version pins nothing.
BUFFER_BYTES = 32 << 20
PART_BYTES = 2 << 20  # of a thread; a buffer has several for each thread, so none waits long for the slowest

Write = Callable[[int, Tensor], None]


class Writers:
    """Threads that write bytes at the same time.

    Args:
        write: writes bytes [n] uint8 on the CPU to an offset; threads call it at the same time.

    Attributes:
        failure: the first OSError of `write`. After it nothing is written.
    """

    def __init__(self, write: Write) -> None:
        self.failure: OSError | None = None
        self._call = write
        self._threads = ThreadPoolExecutor(num_threads(), "weights")

    def write(self, data: Iterable[tuple[int, Tensor]]) -> None:
        """Write bytes, each at its offset, and return when all are written."""
        parts = [
            (at + first, each[first : first + PART_BYTES])
            for at, each in data
            for first in range(0, len(each), PART_BYTES)
        ]
        if len(parts) == 1:
            self._write(*parts[0])
            return
        for written in [self._threads.submit(self._write, *part) for part in parts]:
            written.result()

    def _write(self, at: int, part: Tensor) -> None:
        if self.failure is None:
            try:
                self._call(at, part)
            except OSError as error:
                self.failure = error

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class Staging:
    """Two buffers of host memory: the device fills one while the other one is written.

    A copy from the device to pageable memory waits for the device at each tensor, and also passes through a
    buffer of the driver. Here the device runs on, and the copy waits for it once per buffer. A tensor that was
    put may be freed at once, since copies are in the order of the device's stream.

    Args:
        writers: write to an offset of the region.
        device: of the tensors.
        buffer_bytes: size of each buffer.
    """

    def __init__(self, writers: Writers, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._writers = writers
        self._filling, self._other = (_Buffer(buffer_bytes, device) for _ in range(2))

    def put(self, at: int, data: Tensor) -> None:
        """Copy bytes [n] uint8 on the device to an offset. They are written by `finish` at the latest."""
        while len(data):
            count = min(len(data), self._filling.room)
            self._filling.take(at, data[:count])
            at = at + count
            data = data[count:]
            if not self._filling.room:
                self._turn()

    def finish(self) -> None:
        """Write what has not been written. Call it once, at the end."""
        self._turn()
        self._turn()

    def _turn(self) -> None:
        """Let the device fill the other buffer next, once that is written."""
        self._filling.close()
        self._filling, self._other = self._other, self._filling
        self._writers.write(self._filling.empty())


class _Buffer:
    def __init__(self, num_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self._parts: list[tuple[int, Tensor]] = []  # offset in the region, and the bytes here
        self._used = 0

    @property
    def room(self) -> int:
        return len(self._memory) - self._used

    def take(self, at: int, data: Tensor) -> None:
        """Begin to copy bytes from the device."""
        here = self._memory[self._used : self._used + len(data)]
        here.copy_(data, non_blocking=True)
        self._used += len(data)
        self._parts.append((at, here))

    def close(self) -> None:
        """Mark the end of the copies."""
        if self._copied is not None:
            self._copied.record()

    def empty(self) -> list[tuple[int, Tensor]]:
        """Wait for the copies, and return their parts."""
        if self._copied is not None:
            self._copied.synchronize()
        parts = self._parts
        self._parts = []
        self._used = 0
        return parts


def load(
    tensors: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    device: torch.device,
    buffer_bytes: int = BUFFER_BYTES,
) -> None:
    """Copy the tensors of a version, on the CPU, to those of the same names and shapes on a device.

    Where dtypes differ, the device casts. Own tensors whose names are not given stay as they are.

    Args:
        buffer_bytes: of host memory, twice.
    """
    loading = _Loading(device, buffer_bytes)
    for name, tensor in tensors.items():
        loading.put(own[name], tensor)
    loading.finish()


class _Loading:
    """Two buffers of host memory: threads fill one while the device copies from the other one.

    A copy from pageable memory waits for the one thread of the driver that fills its buffer.

    Args:
        device: of the tensors that get the bytes.
        buffer_bytes: size of each buffer; it has room for an element.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        is_cuda = device.type == "cuda"
        buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self._buffers = buffers
        self._copied = [torch.cuda.Event() for _ in buffers] if is_cuda else []  # type: ignore[no-untyped-call]
        # On the device, on the CPU, and the first byte in the buffer.
        self._parts: list[tuple[Tensor, Tensor, int]] = []
        self._num_turns = self._used = 0
        self._writers = Writers(lambda at, data: _copy(data, buffers[at // buffer_bytes][at % buffer_bytes :]))

    def put(self, own: Tensor, theirs: Tensor) -> None:
        """Copy a tensor on the CPU to one of its shape on the device, which casts it if dtypes differ.

        The copy ends by `finish` at the latest. Until then neither may change.
        """
        if not own.is_contiguous():
            own.detach().copy_(theirs)
            return
        own = own.detach().view(-1)
        theirs = theirs.contiguous().view(-1)
        while len(theirs):
            count = min(len(theirs), (len(self._buffers[0]) - self._used) // theirs.itemsize)
            if count > 0:
                self._parts.append((own[:count], theirs[:count], self._used))
                self._used = aligned(self._used + count * theirs.itemsize)
                own = own[count:]
                theirs = theirs[count:]
            else:
                self._turn()

    def finish(self) -> None:
        """Copy what has not been copied, and wait for the device. Call it once, at the end."""
        self._turn()
        for copied in self._copied:
            copied.synchronize()
        self._writers.close()

    def _turn(self) -> None:
        """Fill a buffer, and let the device copy from it."""
        which = self._num_turns % 2
        buffer = self._buffers[which]
        if self._copied:
            self._copied[which].synchronize()  # what was here before
        first = which * len(buffer)
        self._writers.write((first + at, theirs.view(torch.uint8)) for _, theirs, at in self._parts)
        for own, theirs, at in self._parts:
            here = buffer[at : at + theirs.nbytes].view(theirs.dtype)
            if own.dtype != here.dtype:
                here = here.to(own.device, non_blocking=True)
            own.copy_(here, non_blocking=True)
        if self._copied:
            self._copied[which].record()
        self._parts = []
        self._used = 0
        self._num_turns = self._num_turns + 1


def _copy(data: Tensor, to: Tensor) -> None:
    """Copy bytes by this thread alone, without the interpreter's lock; torch would start threads for it."""
    there = memory_of(to[: len(data)])
    np.copyto(np.frombuffer(there, np.uint8), np.frombuffer(memory_of(data), np.uint8))
