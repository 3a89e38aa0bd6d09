"""Ensures that no process of a role outlives the process that started it.

`python process_group.py PARENT COMMAND...` runs a command. When the command or PARENT ends, all processes
that the command started are killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127  # a shell's status of a command that it cannot start

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
    """Return a command that runs this one by `run_as_group`. Start it in a session of its own.

    Only on Linux can a process watch for the end of its parent. On other systems the result is the command
    itself, which survives if this process is killed.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # another system, or a sandbox that lacks the call
        return tuple(command)
    return (sys.executable, "-S", "-E", __file__, str(os.getpid()), *command)


def run_as_group(parent: int, command: Sequence[str]) -> int:
    """Run a command. When it ends, the parent ends, or SIGTERM comes, kill all processes that it started.

    When a parent ends, the kernel can kill its children, but not the processes that these have started. So this
    process waits for the command and for the parent. It must lead its process group. It adopts each process
    that loses its own parent, also in another session (a subreaper, see prctl(2)). SIGKILL to the group ends
    this process too, and then processes that have left the group survive.

    Args:
        parent: process id of the parent.
        command: the program and its arguments.

    Returns:
        The command's status; if a signal ended it, 128 plus the signal's number, as in a shell.
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
    """Reap all children that have ended. Return the status of this one, or None if it still runs."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                return os.waitstatus_to_exitcode(found[1])
    return None


def _end_all(children: str) -> None:
    """Kill this process's children, and all that it adopts when these have ended.

    Args:
        children: the file in which the kernel lists them.
    """
    with suppress(ChildProcessError):
        while True:
            with open(children) as listed:
                for pid in listed.read().split():
                    with suppress(PermissionError):  # it is another user's, and ends with its own parent
                        os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def _become(command: Sequence[str]) -> None:
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a command would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], tuple(command))
    except OSError as error:
        os.write(2, f"{command[0]}: {not_started(command, error)}\n".encode(errors="surrogateescape"))
    os._exit(NOT_STARTED)


def not_started(command: Sequence[str], error: OSError) -> str:
    """Say why the system does not start a command, and what to write instead.

    Args:
        command: the program and its arguments.
        error: of exec.
    """
    import shutil  # not for every command that is started

    program = command[0]
    # A shell looks for a script's name in no folder of PATH. One that is not executable is found there, too.
    found = shutil.which(program) or shutil.which(program, os.F_OK) or program
    named = ", ".join(("python" if program.endswith(".py") else "sh", found, *command[1:]))
    if error.errno == errno.ENOEXEC:
        return f"it has no `#!` line, and is no program of this machine; if it is a script, write [{named}]"
    if error.errno in (errno.EACCES, errno.EISDIR):
        of_name = [found] if os.sep in found else [os.path.join(folder, found) for folder in os.get_exec_path()]
        if directory := next(filter(os.path.isdir, of_name), None):
            return f"{'it' if directory == program else directory} is a directory; write the program in it"
    if error.errno == errno.EACCES:
        return f"it is not executable; if it is a script, write [{named}]"
    if error.errno == errno.ENOENT:
        if os.sep in found and os.path.exists(found):
            return f"the program in its `#!` line does not exist; write another one, as in [{named}]"
        if " " in program:
            return f"there is no such program; if these are several words, write [{', '.join(program.split())}]"
        if os.path.exists(program):
            return f"no folder of PATH has it; write ./{program}"
        return "there is no such program"
    return error.strerror or str(error)


if __name__ == "__main__":
    os._exit(run_as_group(int(sys.argv[1]), sys.argv[2:]))
