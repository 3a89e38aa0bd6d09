"""The memory that a version's bytes lie in."""

from __future__ import annotations

import logging
import mmap
import os
import re
import secrets
import weakref

import torch
from torch import Tensor

from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import SharedRegion

try:  # Linux alone
    from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
    from os import MFD_ALLOW_SEALING, MFD_CLOEXEC, memfd_create

    CAN_SHARE, FIXED_SIZE = True, F_SEAL_SHRINK | F_SEAL_GROW
except ImportError:
    CAN_SHARE = False

log = logging.getLogger(__name__)

SHARED_PATH = re.compile(r"/proc/\d+/fd/\d+")


class Region:
    """Bytes in an anonymous file that lies in memory: written as they come, so that pages are taken for what
    has arrived and not for what was announced; read through a mapping; sealed when whole.

    Other processes of the same user on this machine can map the same pages (`shared`, `open`). The file can
    never shrink under them, and once sealed nobody can change it. It goes when the last one lets it go, however
    processes end. Writing to such a file is also several times cheaper than to fresh memory of a process: no
    page fault for each 4 KiB. Where there are no such files, or none so large (`ulimit -f`), it is memory of
    this process alone.

    Args:
        num_bytes: its size.

    Raises:
        WeightsUnavailable: the machine has not so much memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self._hold(_new_file(num_bytes) if CAN_SHARE else None, num_bytes, is_own=True)

    def _hold(self, fd: int | None, num_bytes: int, is_own: bool) -> None:
        self._fd, self.num_bytes, self.is_own = fd, num_bytes, is_own
        if fd is not None:
            weakref.finalize(self, os.close, fd)
        try:
            if not num_bytes:
                self._memory: mmap.mmap | bytearray = bytearray()
            elif fd is None:
                self._memory = mmap.mmap(-1, num_bytes)
            else:  # Private: whoever writes into a tensor by mistake damages a copy of his own.
                self._memory = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise WeightsUnavailable(f"no memory for {num_bytes} bytes of weights: {error.strerror}") from error

    @classmethod
    def open(cls, shared: SharedRegion, num_bytes: int) -> Region | None:
        """Another process's region, for reading; None where there is none such on this machine."""
        if not CAN_SHARE or not SHARED_PATH.fullmatch(shared.path):
            return None
        try:
            fd = os.open(shared.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        found = os.fstat(fd)
        same = (_name(fd), found.st_size, found.st_uid) == (shared.name, num_bytes, os.geteuid())
        if not (same and _seals(fd) & FIXED_SIZE == FIXED_SIZE):
            os.close(fd)
            return None
        region = cls.__new__(cls)
        region._hold(fd, num_bytes, is_own=False)
        return region

    @property
    def shared(self) -> SharedRegion | None:
        """Where others find it."""
        if self._fd is None:
            return None
        return SharedRegion(path=f"/proc/{os.getpid()}/fd/{self._fd}", name=_name(self._fd))

    def write(self, offset: int, data: memoryview) -> None:
        """Puts bytes in place."""
        assert self.is_own, "another process's region is read, not written"
        if self._fd is None:
            self._memory[offset : offset + data.nbytes] = data
            return
        while data.nbytes:
            written = os.pwrite(self._fd, data, offset)
            offset, data = offset + written, data[written:]

    def read(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), not copied."""
        return memoryview(self._memory)[start:end]

    def tensor(self) -> Tensor:
        """The bytes as uint8, not copied."""
        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def seal(self) -> None:
        """From now on nobody can change it."""
        if self._fd is not None and self.is_own:
            fcntl(self._fd, F_ADD_SEALS, F_SEAL_WRITE)

    @property
    def is_sealed(self) -> bool:
        """Whether it is whole and the system keeps everybody from changing it."""
        return self._fd is not None and bool(_seals(self._fd) & F_SEAL_WRITE)


def _new_file(num_bytes: int) -> int | None:
    """An anonymous file of a name that no other has; None where the system refuses."""
    fd = None
    try:
        fd = memfd_create(f"rolemesh-weights-{secrets.token_hex(16)}", MFD_CLOEXEC | MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl(fd, F_ADD_SEALS, FIXED_SIZE)
        return fd
    except OSError as error:
        log.info("weights of %d bytes lie in memory that no other process can map: %s", num_bytes, error)
        if fd is not None:
            os.close(fd)
        return None


def _name(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _seals(fd: int) -> int:
    try:
        return fcntl(fd, F_GET_SEALS)
    except OSError:  # a file of another kind
        return 0
