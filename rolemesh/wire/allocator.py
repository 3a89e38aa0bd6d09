"""Memory for what arrives, and the C allocator's settings. Fresh pages are the largest cost of a transfer
(docs/wire.md), so freed memory is kept."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np

from rolemesh.errors import InvalidBatch
from rolemesh.wire.limits import MAX_REGION_BYTES

ALIGNMENT = 64
GROWTH = 8  # memory of a region, in terms of what has arrived
# Above this many bytes are copied by numpy, which lets other threads run meanwhile. Below it, to wait for them
# afterwards costs more than the copy.
LARGE_COPY = 4 << 20


def tune() -> bool:
    """Makes glibc keep freed memory and serve large blocks from it: 1.5 to 5 times the transport's speed.

    To be called once, at the start of a process, before threads make arenas of their own. The process then
    holds its peak of memory to its end. Returns False, having done nothing, where the C library is not glibc.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018
    except (OSError, AttributeError, TypeError):
        return False
    # The numbers are malloc.h's; -1 for the trim threshold is the largest size_t: never trim.
    m_trim_threshold, m_top_pad, m_mmap_max, m_arena_max = -1, -2, -4, -8
    settings = {m_arena_max: 1, m_mmap_max: 0, m_trim_threshold: -1, m_top_pad: 64 << 20}
    accepted = [bool(libc.mallopt(parameter, value)) for parameter, value in settings.items()]
    return all(accepted)


def give_back_free_memory() -> None:
    """Returns freed pages to the system, once, `tune` or not: another role is to have them. Does nothing where
    the C library is not glibc, whose allocators return large blocks by themselves."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class Region:
    """Memory for a batch's region, taken as its bytes arrive: a sender that only claims to send much costs
    nothing, one that has sent some GROWTH times that of address space, and of pages only what it has sent.

    Args:
        num_bytes: what the header says.
        max_bytes: what is accepted.

    Raises:
        InvalidBatch: num_bytes is more than max_bytes.
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
        """Bytes that `write` of this part copies: the part's, and all before it where memory must grow."""
        grows = self.memory_for(part) > self._memory.nbytes
        return part.nbytes + (self._arrived if grows else 0)

    def memory_for(self, part: memoryview) -> int:
        """Bytes of memory that the region has after `write` of this part."""
        end = self._arrived + part.nbytes
        return self._memory.nbytes if end <= self._memory.nbytes else min(self.num_bytes, GROWTH * end)

    def write(self, part: memoryview) -> None:
        """Puts the next bytes in place. Raises InvalidBatch where they are more than was announced."""
        end = self._arrived + part.nbytes
        if end > self.num_bytes:
            raise InvalidBatch(f"a batch of {self.num_bytes} bytes, and {end} have arrived")
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
        """The region, writable, starting on a 64-byte boundary. Raises InvalidBatch while bytes are missing."""
        if not self.is_whole:
            raise InvalidBatch(f"a batch of {self.num_bytes} bytes ended after {self._arrived}")
        return self._memory.data

    def _take(self, num_bytes: int) -> None:
        # Aligned by hand: glibc's memalign, which torch uses, asks for more than it keeps, so that a freed
        # region never fits the next of its size and the heap grows by a region each time.
        try:
            spare = np.empty(num_bytes + ALIGNMENT, np.uint8)
        except MemoryError:
            raise InvalidBatch(f"no memory for {num_bytes} bytes of a batch") from None
        start = -spare.ctypes.data % ALIGNMENT
        self._memory = spare[start : start + num_bytes]
