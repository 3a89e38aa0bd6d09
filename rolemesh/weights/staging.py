"""Copies bytes from a GPU into a region, through pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Large next to the start of a copy. Pinned blocks stay with torch, so the next version pins nothing.
BUFFER_BYTES = 32 << 20
# Threads that write a buffer: one thread fills new pages at a few GB/s, far below the device's copies.
NUM_WRITERS = 4
PART_BYTES = BUFFER_BYTES // NUM_WRITERS

Write = Callable[[int, Tensor], None]


class Staging:
    """Two buffers of host memory: the device fills one while the other one is written.

    A copy from the device to pageable memory waits for the device at each tensor, and passes a buffer of the
    driver's besides. Here the device runs on, and is waited for once a buffer. A tensor that was put may be
    freed at once, since copies are in the order of the device's stream.

    Args:
        write: writes bytes on the CPU to an offset of the region; threads call it at the same time.
        device: of the tensors.
        buffer_bytes: size of each buffer.
    """

    def __init__(self, write: Write, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._write = write
        self._filling, self._other = (_Buffer(buffer_bytes, device) for _ in range(2))
        self._writers = ThreadPoolExecutor(NUM_WRITERS, "weights")

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
        self._writers.shutdown()

    def _turn(self) -> None:
        """Let the device fill the other buffer next, once that is written."""
        self._filling.close()
        self._filling, self._other = self._other, self._filling
        for written in [self._writers.submit(self._write, *part) for part in self._filling.empty()]:
            written.result()


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
        for first in range(0, len(data), PART_BYTES):
            self._parts.append((at + first, here[first : first + PART_BYTES]))

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
