"""The memory that a version's bytes lie in."""

from __future__ import annotations

import mmap
import os
import re
import stat
import tempfile
import weakref

import torch
from torch import Tensor

from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import SharedRegion

try:  # Linux alone
    from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, F_SEAL_WRITE, fcntl
    from os import MFD_ALLOW_SEALING, MFD_CLOEXEC, memfd_create

    CAN_SHARE = True
except ImportError:
    CAN_SHARE = False

SHARED_PATH = re.compile(r"/proc/\d+/fd/\d+")


class Region:
    """Bytes in an anonymous file that lies in memory: written as they come, so that pages are taken for what
    has arrived and not for what was announced; read through a mapping; sealed when whole.

    Other processes of the same user on this machine can map the same pages (`shared`, `open`). The file can
    never shrink under them, and once sealed nobody can change it. It goes when the last one lets it go, however
    processes end. Writing to such a file is also several times cheaper than to fresh memory of a process: no
    page fault for each 4 KiB.

    Args:
        num_bytes: its size.

    Raises:
        WeightsUnavailable: the machine has not so much memory.
    """

    def __init__(self, num_bytes: int) -> None:
        if CAN_SHARE:
            fd = memfd_create("rolemesh-weights", MFD_CLOEXEC | MFD_ALLOW_SEALING)
            os.ftruncate(fd, num_bytes)
            fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
            os.ftruncate(fd, num_bytes)
        self._hold(fd, num_bytes, is_own=True)

    def _hold(self, fd: int, num_bytes: int, is_own: bool) -> None:
        self._fd, self.num_bytes, self.is_own = fd, num_bytes, is_own
        weakref.finalize(self, os.close, fd)
        try:
            # Private: whoever writes into a tensor by mistake damages a copy of his own.
            self._memory = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY) if num_bytes else bytearray()
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
        same = (found.st_ino, found.st_size, found.st_uid) == (shared.inode, num_bytes, os.geteuid())
        if not (same and stat.S_ISREG(found.st_mode) and _seals(fd) & F_SEAL_SHRINK):
            os.close(fd)
            return None
        region = cls.__new__(cls)
        region._hold(fd, num_bytes, is_own=False)
        return region

    @property
    def shared(self) -> SharedRegion | None:
        """Where others find it."""
        if not CAN_SHARE:
            return None
        return SharedRegion(path=f"/proc/{os.getpid()}/fd/{self._fd}", inode=os.fstat(self._fd).st_ino)

    def write(self, offset: int, data: memoryview) -> None:
        """Puts bytes in place."""
        assert self.is_own, "another process's region is read, not written"
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
        if CAN_SHARE and self.is_own:
            fcntl(self._fd, F_ADD_SEALS, F_SEAL_WRITE)

    @property
    def is_sealed(self) -> bool:
        return bool(CAN_SHARE and _seals(self._fd) & F_SEAL_WRITE)


def _seals(fd: int) -> int:
    try:
        return fcntl(fd, F_GET_SEALS)
    except OSError:  # a file of another kind
        return 0
