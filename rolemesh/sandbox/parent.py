"""Ensures that no process of a role outlives the process that started it.

`python parent.py PARENT COMMAND...` runs a command, and kills its process group when PARENT ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127  # the status of a command that is not there, as shells have it

_libc = ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    Call it again after a change of user, which clears the setting.

    Args:
        parent: process id of the parent. If this process has another parent by now, it exits at once.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def group_that_dies_with_me(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs this one as `run_as_group` does. It has to start a session of its own.

    Only Linux tells of a process's end to others: elsewhere it is the command itself, which outlives a killed
    parent.
    """
    if not hasattr(os, "pidfd_open"):
        return tuple(command)
    return (sys.executable, "-S", "-E", __file__, str(os.getpid()), *command)


def run_as_group(parent: int, command: Sequence[str]) -> int:
    """Run a command, and kill this process's group, which it has to lead, when the parent ends.

    The kernel tells a child alone of its parent's end, and not what the child has started. So this process
    stays, and waits for the command and for the parent. What has left the group lives on.

    Args:
        parent: process id of the parent.
        command: the program and its arguments.

    Returns:
        The command's status; if a signal ended it, 128 and the signal's number, as shells have it.
    """
    leader = os.getpid()
    assert os.getpgrp() == leader, "a group with others would be killed"
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return 1
    if os.getppid() != parent:  # it has ended, and another process has its number
        return 1
    child = os.fork()
    if child == 0:
        die_with_parent(leader)
        _become(command)
    os.closerange(0, 3)  # the command's pipes end with the command
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([watched, ended], [], [])
    if watched in ready:
        os.killpg(leader, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if status >= 0 else 128 - status


def _become(command: Sequence[str]) -> None:
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], tuple(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
    os._exit(NOT_STARTED)


if __name__ == "__main__":
    os._exit(run_as_group(int(sys.argv[1]), sys.argv[2:]))
