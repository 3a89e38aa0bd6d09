"""Memory for received batches, and settings of the C allocator.

Touching fresh pages is the largest cost of a transfer (docs/wire.md), so the process keeps freed memory.
"""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np

from rolemesh.errors import InvalidBatch
from rolemesh.wire.limits import MAX_REGION_BYTES

ALIGNMENT = 64
GROWTH = 8  # a region's memory is at most this many times the bytes that have arrived
# Larger parts are copied by numpy, which lets other threads run during the copy. For smaller parts, waiting for
# those threads afterwards would cost more than the copy.
LARGE_COPY = 4 << 20


def tune() -> bool:
    """Make glibc keep freed memory and reuse it for large blocks: 1.5 to 5 times the transport's speed.

    Call it once, at process start, before threads create arenas of their own. The process then keeps its peak
    memory until it exits. Returns False without any effect if the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return False
    # The numbers are from malloc.h. -1 as the trim threshold is the largest size_t: never trim.
    m_trim_threshold = -1
    m_top_pad = -2
    m_mmap_max = -4
    m_arena_max = -8
    settings = {m_arena_max: 1, m_mmap_max: 0, m_trim_threshold: -1, m_top_pad: 64 << 20}
    accepted = [bool(libc.mallopt(parameter, value)) for parameter, value in settings.items()]
    return all(accepted)


def give_back_free_memory() -> None:
    """Return freed pages to the system now, even after `tune`, so that another role can use them.

    Does nothing if the C library is not glibc: other allocators return large blocks by themselves.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class GrowingBuffer:
    """Memory for a batch's region, allocated as its bytes arrive.

    A sender that only announces many bytes costs nothing. One that has sent some costs up to GROWTH times that
    in address space, and only the bytes sent in pages.

    Args:
        num_bytes: the region's size according to the header.
        max_bytes: the largest region accepted.

    Raises:
        InvalidBatch: num_bytes exceeds max_bytes.
    """

    def __init__(self, num_bytes: int, max_bytes: int = MAX_REGION_BYTES) -> None:
        if num_bytes > max_bytes:
            raise InvalidBatch(f"a batch of {num_bytes} bytes; at most {max_bytes} are accepted")
        self.num_bytes = num_bytes
        self._arrived = 0
        self._take(0)

    @property
    def is_whole(self) -> bool:
        return self._arrived == self.num_bytes

    def moves_for(self, part: memoryview) -> int:
        """Bytes that `write(part)` copies: the part, plus all earlier bytes if memory must grow."""
        grows = self.memory_for(part) > self._memory.nbytes
        return part.nbytes + (self._arrived if grows else 0)

    def memory_for(self, part: memoryview) -> int:
        """Bytes of memory that the region has after `write(part)`."""
        end = self._arrived + part.nbytes
        return self._memory.nbytes if end <= self._memory.nbytes else min(self.num_bytes, GROWTH * end)

    def write(self, part: memoryview) -> None:
        """Append the next bytes. Raises InvalidBatch if they exceed the announced size."""
        end = self._arrived + part.nbytes
        if end > self.num_bytes:
            raise InvalidBatch(f"the header announced a batch of {self.num_bytes} bytes; {end} arrived")
        if end > self._memory.nbytes:
            before = self._memory[: self._arrived]
            self._take(self.memory_for(part))
            self._memory[: before.nbytes] = before
        if part.nbytes > LARGE_COPY:
            self._memory[self._arrived : end] = np.frombuffer(part, np.uint8)
        else:
            self._memory.data[self._arrived : end] = part
        self._arrived = end

    def whole(self) -> memoryview:
        """The region: writable, 64-byte aligned. Raises InvalidBatch if bytes are missing."""
        if not self.is_whole:
            raise InvalidBatch(f"a batch of {self.num_bytes} bytes ended after {self._arrived}")
        return self._memory.data

    def _take(self, num_bytes: int) -> None:
        # Aligned by hand: glibc's memalign, which torch uses, requests more than it keeps. A freed region would
        # never fit the next one of the same size, and the heap would grow by a region each time.
        try:
            spare = np.empty(num_bytes + ALIGNMENT, np.uint8)
        except MemoryError:
            raise InvalidBatch(f"no memory for {num_bytes} bytes of a batch") from None
        start = -spare.ctypes.data % ALIGNMENT
        self._memory = spare[start : start + num_bytes]
