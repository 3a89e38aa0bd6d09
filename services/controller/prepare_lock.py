"""Lets the pods of a job prepare one at a time, by the lock of a file that they share.

It imports little: most starts find that everything is there.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rolemesh.errors import RolemeshError
from rolemesh.home import lock

log = logging.getLogger(__name__)

RETRY_S = 1.0


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Exit with status 128 + SIGTERM when the signal comes.

    Without a handler, the kernel would drop it in process 1, which a command of a container is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the exclusive lock of a file. Wait while another process has it; it is free when that process ends.

    Args:
        file: is made, and stays.

    Raises:
        RolemeshError: the file system has no locks, or none for this user.
        OSError: the file cannot be made, opened or locked.
    """
    with os.fdopen(_descriptor(file), "rb") as opened:
        is_first = True
        while True:
            try:
                lock(opened, file.absolute().parent)
                break
            except BlockingIOError:
                if is_first:
                    log.info("another process prepares; this one waits for the lock of %s", file)
                is_first = False
                time.sleep(RETRY_S)  # a signal ends it, but not a flock that begins just after the signal
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                raise RolemeshError(
                    f"{file.absolute()} belongs to another user, and NFS locks a file only for those who may "
                    "write it. Delete it, or let its group write it (`chmod g+w`) and run both with that group"
                ) from error
        yield


def _descriptor(file: Path) -> int:
    """Open a file for its lock, and make it if need be. Others of its group may use it, too."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except PermissionError as denied:
        try:  # another user has made it; to read it is enough but on NFS
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # it is the directory that may not be written
            raise denied from None
    with suppress(PermissionError):  # only its owner may
        os.fchmod(descriptor, 0o664)  # whatever the umask
    return descriptor
