"""Copies bytes from a GPU into a region, through pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rolemesh.weights.region import num_threads

# Large next to the start of a copy. Pinned blocks stay with torch, so the next version pins nothing.
BUFFER_BYTES = 32 << 20
PART_BYTES = 2 << 20  # of a thread; a buffer has several for each, so that none waits long for the slowest

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

    A copy from the device to pageable memory waits for the device at each tensor, and passes a buffer of the
    driver's besides. Here the device runs on, and is waited for once a buffer. A tensor that was put may be
    freed at once, since copies are in the order of the device's stream.

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
            at, data = at + count, data[count:]
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
        """Wait for the copies, and return what came."""
        if self._copied is not None:
            self._copied.synchronize()
        parts, self._parts, self._used = self._parts, [], 0
        return parts
