"""Memory that holds the bytes of one version of the weights."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import secrets
import threading
import weakref
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rolemesh.cpus import usable_cpus
from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import SharedRegion

try:  # only on Linux
    from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
    from os import MFD_ALLOW_SEALING, MFD_CLOEXEC, memfd_create

    CAN_SHARE = True
    FIXED_SIZE = F_SEAL_SHRINK | F_SEAL_GROW
except ImportError:
    CAN_SHARE = False

log = logging.getLogger(__name__)

NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14
MAX_THREADS = 8
# From this number on, threads write faster through a mapping than to the file, where they take turns: on a
# machine with 16 cores 8 threads reach 4.8 GB/s and 2.7 GB/s. One thread reaches half as much as to the file,
# since the kernel zeroes pages of a mapping first.
MAPPING_THREADS = 6
LIBC = ctypes.CDLL(None)
SHARED_PATH = re.compile(r"/proc/\d+/fd/\d+")


@cache
def num_threads() -> int:
    """Return how many threads of a process write or read a region at the same time."""
    return min(MAX_THREADS, usable_cpus())


class WeightRegion:
    """Bytes in an anonymous in-memory file (memfd).

    The file is written as bytes arrive, read through a mapping, and sealed when whole. Its pages are allocated
    for bytes that have arrived, not for bytes announced. For one thread, writing to it is several times cheaper
    than writing to fresh process memory, which costs a page fault for each 4 KiB. Many threads `fill` it.

    Other processes of the same user on this machine can map the same pages (`shared`, `open`). The file can
    never shrink under them, and once sealed nobody can change it. The kernel frees it when its last user closes
    it or dies. If the system has no such files, or allows none so large (`ulimit -f`), the region is private
    process memory.

    Args:
        num_bytes: size of the region.
        is_filled: every byte will be written, so the machine must have the memory. A machine that holds stripes
            fills few bytes of a region that may be larger than its memory.

    Raises:
        WeightsUnavailable: the machine lacks the memory.
    """

    def __init__(self, num_bytes: int, is_filled: bool = True) -> None:
        self._hold(_new_file(num_bytes) if CAN_SHARE else None, num_bytes, is_own=True, reserves=is_filled)

    def _hold(self, fd: int | None, num_bytes: int, *, is_own: bool, reserves: bool) -> None:
        self._fd = fd
        self.num_bytes = num_bytes
        self.is_own = is_own
        self._can_write = is_own
        self._pages: weakref.ref[mmap.mmap] | None = None  # mapped for writing, while threads write
        self._mapping = threading.Lock()
        if fd is not None:
            weakref.finalize(self, os.close, fd)
        try:
            if not num_bytes:
                self._memory: mmap.mmap | bytearray = bytearray()
            elif fd is None:
                self._memory = mmap.mmap(-1, num_bytes)
            else:  # copy on write: an erroneous write to a tensor damages only this process's copy
                flags = mmap.MAP_PRIVATE | (0 if reserves else NO_RESERVE)
                self._memory = mmap.mmap(fd, num_bytes, flags=flags)
        except OSError as error:
            raise WeightsUnavailable(f"no memory for {num_bytes} bytes of weights: {error.strerror}") from error

    @classmethod
    def open(cls, shared: SharedRegion, num_bytes: int) -> WeightRegion | None:
        """Map another process's region for reading; None if it cannot be opened or is another file."""
        return cls._open(shared, num_bytes, os.O_RDONLY)

    @classmethod
    def open_to_fill(cls, shared: SharedRegion, num_bytes: int) -> WeightRegion | None:
        """As open, and allow `write` too, until the other process seals the region."""
        return cls._open(shared, num_bytes, os.O_RDWR)

    @classmethod
    def _open(cls, shared: SharedRegion, num_bytes: int, access: int) -> WeightRegion | None:
        if not CAN_SHARE or not SHARED_PATH.fullmatch(shared.path):
            return None
        try:
            fd = os.open(shared.path, access | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        found = os.fstat(fd)
        same = (_name(fd), found.st_size, found.st_uid) == (shared.name, num_bytes, os.geteuid())
        if not (same and _seals(fd) & FIXED_SIZE == FIXED_SIZE):
            os.close(fd)
            return None
        region = cls.__new__(cls)
        region._hold(fd, num_bytes, is_own=False, reserves=False)
        region._can_write = access == os.O_RDWR
        return region

    @property
    def shared(self) -> SharedRegion | None:
        """Where other processes can open this region; None if it is private memory."""
        if self._fd is None:
            return None
        return SharedRegion(path=f"/proc/{os.getpid()}/fd/{self._fd}", name=_name(self._fd))

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset."""
        assert self._can_write, "another process's region is read-only"
        if self._fd is None:
            self._memory[offset : offset + data.nbytes] = data
            return
        while data.nbytes:
            written = os.pwrite(self._fd, data, offset)
            offset = offset + written
            data = data[written:]

    def fill(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset. `num_threads` threads do so at the same time.

        Raises:
            OSError: the machine lacks the memory.
        """
        assert self._can_write, "another process's region is read-only"
        if num_threads() < MAPPING_THREADS or not self._fill_pages(offset, data):
            self.write(offset, data)

    def _fill_pages(self, offset: int, data: memoryview) -> bool:
        """Write through a writable mapping. False if that is impossible: `write` can, or says why not.

        The pages are allocated by a call that may fail. A process that just writes to a mapping is killed
        (SIGBUS) if there is no memory for a page.
        """
        pages = self._writable() if data.nbytes else None
        if pages is None:
            return False
        to = np.frombuffer(pages, np.uint8, data.nbytes, offset)
        start = to.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        size = ctypes.c_size_t(to.ctypes.data + data.nbytes - start)
        if LIBC.madvise(ctypes.c_void_p(start), size, POPULATE_WRITE):
            return False
        np.copyto(to, np.frombuffer(data, np.uint8))  # without the interpreter's lock
        return True

    def _writable(self) -> mmap.mmap | None:
        """Map the file for writing; None if it is private memory or cannot be mapped.

        All threads share the mapping. It is removed with its last user, since a file that is mapped for
        writing cannot be sealed. A process that is forked meanwhile does not inherit it.
        """
        if self._fd is None:
            return None
        with self._mapping:
            pages = self._pages() if self._pages is not None else None
            if pages is None:
                try:
                    pages = mmap.mmap(self._fd, self.num_bytes)
                    pages.madvise(mmap.MADV_DONTFORK)
                except OSError:
                    return None
                self._pages = weakref.ref(pages)
            return pages

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes [start, end) without a copy."""
        return memoryview(self._memory)[start:end]

    def tensor(self) -> Tensor:
        """Return the bytes as a uint8 tensor without a copy."""
        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def seal(self) -> None:
        """Make the file immutable, for this process too. No effect on private memory or on another's region."""
        if self._fd is not None and self.is_own:
            fcntl(self._fd, F_ADD_SEALS, F_SEAL_WRITE)

    @property
    def is_sealed(self) -> bool:
        """True if the region is whole and the kernel rejects every change to it."""
        return self._fd is not None and bool(_seals(self._fd) & F_SEAL_WRITE)


def _new_file(num_bytes: int) -> int | None:
    """Create an anonymous file with a unique name; None if the system refuses."""
    fd = None
    try:
        fd = memfd_create(f"rolemesh-weights-{secrets.token_hex(16)}", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl(fd, F_ADD_SEALS, FIXED_SIZE)
        return fd
    except OSError as error:
        log.info(
            "no other process can map these weights of %d bytes; using private memory: %s", num_bytes, error
        )
        if fd is not None:
            os.close(fd)
        return None


def _name(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _seals(fd: int) -> int:
    try:
        return fcntl(fd, F_GET_SEALS)
    except OSError:  # not a memfd
        return 0
