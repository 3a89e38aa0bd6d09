"""The inside of an interpreter that keeps its variables from one call to the next.

The sandbox's process forks a supervisor for each interpreter, and the supervisor forks the interpreter. The
supervisor never reads code. It lets the interpreter run only during calls, and kills it at a call's limits.
"""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import os
import select
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from rolemesh.process_group import die_with_parent

RECURSION = 1000  # Python's own limit
LONGEST_SLICE_S = 0.1  # seconds between two looks at the CPU time
_supervisors: set[int] = set()  # process ids of those that live


def forked(sandbox_socket: socket.socket, files: list[int]) -> bool:
    """Fork a supervisor. Return True in it, and False in the sandbox's process.

    Args:
        sandbox_socket: the sandbox's own, which the supervisor closes.
        files: the interpreter's descriptors, which the sandbox's process closes.
    """
    for pid in list(_supervisors):
        if os.waitpid(pid, os.WNOHANG)[0]:
            _supervisors.discard(pid)
    parent = os.getpid()
    if pid := os.fork():
        _supervisors.add(pid)
        for file in files:
            os.close(file)
        return False
    die_with_parent(parent)
    sandbox_socket.close()
    return True


def supervise(
    asked: dict[str, Any], files: list[int], home: int, tasks: int, confine: Callable[..., str]
) -> None:
    """Supervise an interpreter until its other end closes or the interpreter ends.

    Args:
        asked: memory_bytes and output_bytes.
        files: the control socket, the file with a call's code, and the file of its output.
        home: the interpreter's directory.
        tasks: number of threads that the user ran when the sandbox started.
        confine: `inside.confine`.
    """
    control = socket.socket(fileno=files[0])
    code, output = files[1:]
    ours, theirs = socket.socketpair()
    report, tell = os.pipe()
    supervisor = os.getpid()
    tasks = tasks + 2 * len(_supervisors)
    pid = os.fork()
    if pid == 0:
        kept = (home, tell, theirs.fileno())
        confine(asked, [code, code, output], kept, supervisor, tasks, cpu_s=None)
        converse(theirs)
        return
    theirs.close()
    ours.setblocking(False)  # an interpreter that reads no calls must not keep this process from its limits
    os.close(tell)
    with open(report, "rb") as file:
        failed = file.read().decode()
    _tell(control, {"failed": failed})
    process = os.pidfd_open(pid)
    while message := control.recv(4096):
        ended = _call(json.loads(message), control, ours, process, pid)
        _tell(control, {"ended": ended})
        if ended:
            return  # and the interpreter, if it lives, dies with this process


def _tell(control: socket.socket, answer: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(answer).encode())
    except OSError:
        os._exit(0)  # the other end is closed


def _call(limits: dict[str, Any], control: socket.socket, link: socket.socket, process: int, pid: int) -> str:
    """Let the interpreter run one call. Return why the interpreter has ended, or "" if it goes on."""
    clock = ~pid << 3 | 2  # of its CPU time, as clock_getcpuclockid(3) computes it
    began = time.monotonic()
    cpu = time.clock_gettime(clock)
    waiting = select.poll()
    for file in (process, link.fileno(), control.fileno()):
        waiting.register(file, select.POLLIN)
    signal.pidfd_send_signal(process, signal.SIGCONT)
    try:
        link.send(b"c")
        while True:
            wall_left = limits["wall_s"] - (time.monotonic() - began)
            cpu_left = limits["cpu_s"] - (time.clock_gettime(clock) - cpu)
            if wall_left <= 0:
                return f"it took longer than {limits['wall_s']:g} s"
            if cpu_left <= 0:
                return f"it took more than {limits['cpu_s']:g} s of CPU time"
            ready = [file for file, _ in waiting.poll(1000 * min(wall_left, LONGEST_SLICE_S))]
            if control.fileno() in ready:  # it says nothing during a call, so its other end is closed
                os._exit(0)
            if process in ready:
                return _how(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            if link.fileno() in ready:
                if link.recv(1):
                    signal.pidfd_send_signal(process, signal.SIGSTOP)  # its threads, too, until the next call
                    return ""
                # It ends, or the code has closed it: then the code runs to its end all the same, so that the
                # reason does not depend on how far it came.
                waiting.unregister(link.fileno())
    except OSError:  # it has ended
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return _how(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _how(code: int) -> str:
    return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with status {code}"


# --------------------------------------------------------------------------------- the interpreter


def converse(link: socket.socket) -> None:
    """Run the code in standard input each time that a byte comes on `link`, and answer with a byte.

    All code runs in one namespace, as at Python's prompt. Standard output gets the printed text, the repr of a
    last expression, the traceback of an error, and what Python writes to standard error.
    """
    sys.stderr = sys.stdout
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    sys.argv[:] = [""]
    sys.setrecursionlimit(RECURSION)
    number = 0
    link_file = link.detach()
    while os.read(link_file, 1):
        number += 1
        with open(0, encoding="utf-8", errors="replace", closefd=False) as file:
            code = file.read()
        _run(code, f"<call {number}>", main.__dict__)
        _flush()
        try:
            os.write(link_file, b"d")
        except OSError:  # the code has closed it
            os._exit(1)


def _run(code: str, name: str, names: dict[str, Any]) -> None:
    lines = [f"{line}\n" for line in code.split("\n")]
    linecache.cache[name] = (len(code), None, lines, name)  # tracebacks show them
    try:
        tree = ast.parse(code, name)
        last = tree.body[-1:] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        tree.body = tree.body[: len(tree.body) - len(last)]
        exec(compile(tree, name, "exec"), names)
        exec(compile(ast.Interactive(last), name, "single"), names)  # prints the value, unless it is None
    except SystemExit:
        _flush()
        raise
    except BaseException as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename != name:
            frames = frames.tb_next
        try:
            traceback.print_exception(type(error), error, frames, file=sys.stdout)
        except BaseException:  # the output is full, or there is no memory for it
            _say_briefly(error)


def _say_briefly(error: BaseException) -> None:
    try:
        print(type(error).__name__)
    except BaseException:
        _flush()


def _flush() -> None:
    """Write the printed text. Text for which the output has no room is dropped, not left to the next call."""
    try:
        sys.stdout.flush()
    except BaseException:
        output = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stdout = sys.stderr = output
