"""Processes in PID namespaces: they cannot open each other's memory, as on several machines; the first is 1."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, NEW_MOUNTS, NEW_PIDS = 1, 0x20000, 0x20000000  # of <linux/prctl.h> and <linux/sched.h>


def as_machine(*runs: Callable[[], None]) -> None:
    """Call each function in a process of its own. All are in one new PID namespace, with a /proc of its own.

    This process waits for them, and ends with the first exit code that is not 0. If it is killed, they end.
    """
    if LIBC.unshare(NEW_PIDS | NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if (first := os.fork()) != 0:
        os._exit(_code_of(first))
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with this one, all of its namespace end
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    children = [_started(run) for run in runs]
    os._exit(next((code for code in map(_code_of, children) if code), 0))


@contextmanager
def as_container(*command: str, **how: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command as process 1 of a new PID namespace, to which signals without a handler are not sent.

    Its exit code is that of the process here, which waits for it. At the end it is killed.
    """
    unshare = ["unshare", "--pid", "--fork", "--kill-child", *command]
    with subprocess.Popen(unshare, text=True, **how) as started:
        try:
            yield started
        finally:
            started.kill()


def terminate(container: subprocess.Popen[str]) -> None:
    """Send SIGTERM to process 1 of a container, as a kubelet does."""
    [first] = Path(f"/proc/{container.pid}/task/{container.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)


def _started(run: Callable[[], None]) -> int:
    if (child := os.fork()) == 0:
        run()
        os._exit(0)
    return child


def _code_of(child: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _may_make_namespaces() -> bool:
    if sys.platform != "linux":
        return False
    made = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "true"], check=False, capture_output=True
    )
    return made.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _may_make_namespaces(), reason="MACHINES AND CONTAINERS ARE NOT TESTED: PID namespaces need root"
)
