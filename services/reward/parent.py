"""No process of the reward role outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends, in whatever way (prctl(2),
    PR_SET_PDEATHSIG). To be said anew after the user has changed.

    Args:
        parent: who started it: who has another parent by now has lost it, and ends at once.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
