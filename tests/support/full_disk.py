"""A disk that is full, without filling one."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Make this process's files like those of a full disk: a write beyond this size fails.

    Python writes no bytecode meanwhile. It would leave a module's cache file cut at the limit, on which every
    later import of the module fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    wrote_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
        sys.dont_write_bytecode = wrote_no_bytecode
