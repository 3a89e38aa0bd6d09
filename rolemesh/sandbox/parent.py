"""Ensures that no process of a role outlives the process that started it.

`python parent.py PARENT COMMAND...` runs a command, and ends everything that it has started when the command or
PARENT ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
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
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, or a sandbox that lacks the call
        return tuple(command)
    return (sys.executable, "-S", "-E", __file__, str(os.getpid()), *command)


def run_as_group(parent: int, command: Sequence[str]) -> int:
    """Run a command, and end everything that it has started when it ends, when the parent ends, or on SIGTERM.

    The kernel tells a child alone of its parent's end, and not what the child has started. So this process
    stays, and waits for the command and for the parent. It adopts what loses its own parent (a subreaper, see
    prctl(2)), also in another session. SIGKILL to this process's group, which it has to lead, ends it with the
    group, and spares what has left the group.

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
    children = f"/proc/self/task/{leader}/children"
    adopts = os.path.exists(children) and _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    child = os.fork()
    if child == 0:
        die_with_parent(leader)
        _become(command)
    os.closerange(0, watched)  # the command's pipes end with the command
    os.closerange(watched + 1, os.sysconf("SC_OPEN_MAX"))
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    status: int | None = None
    while (status := _reaped(child)) is None:
        ready, _, _ = select.select([watched, woken], [], [])
        if watched in ready or signal.SIGTERM in os.read(woken, 1 << 16):
            break
    if adopts:
        _end_all(children)
    elif status is None:
        os.killpg(leader, signal.SIGKILL)
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def _reaped(child: int) -> int | None:
    """Wait for what has ended, and return the child's status if it is among them."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                return os.waitstatus_to_exitcode(found[1])
    return None


def _end_all(children: str) -> None:
    """Kill the children that the kernel lists in a file, and those of the dead, which it lists there then."""
    with suppress(ChildProcessError):
        while True:
            with open(children) as listed:
                for pid in listed.read().split():
                    with suppress(PermissionError):  # another user's, which ends with its own parent
                        os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


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
