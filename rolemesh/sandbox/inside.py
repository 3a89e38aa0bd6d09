"""The inside of the sandbox: a bare interpreter that restricts its own rights, and forks for each program.

A fork is faster than a new interpreter with the same imports, and as safe: no program has run in its memory.
Programs and their input arrive as open files that this process never reads, so no program finds another's text
in memory. Expected outputs are never sent here.

`python -m rolemesh.sandbox.inside CONTROL HOME`: two file descriptors. CONTROL is the socket on
which programs arrive. HOME is the interpreter's own directory, which stays readable when the path to it is not.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import types
from typing import Any

from rolemesh.process_group import die_with_parent
from rolemesh.sandbox import interpreter_inside
from rolemesh.sandbox.landlock import no_new_privileges, restrict_to_reading
from rolemesh.sandbox.seccomp import allow_computing_only

NOBODY = 65534  # the user and group that replace root
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/urandom")
INSTALLED = ("site-packages", "dist-packages")  # in the standard library's directory, but not part of it
THREADS = 512  # a program's threads, beyond those that its user already runs; memory often limits earlier
STACK_BYTES = 64 << 20  # default stack of a thread; deep recursion needs it
OPEN_FILES = 64
RECURSION = 600_000
BUSY = 8  # see idle_time
READY = b"ready"

# Names that programs of the data sets APPS, TACO and PRIME use without an import. builtins come late, so that
# pow is not math.pow.
PRELUDE = """
from string import *; from re import *; from datetime import *; from collections import *; from heapq import *
from bisect import *; from copy import *; from math import *; from random import *; from statistics import *
from itertools import *; from functools import *; from operator import *; from io import *; from sys import *
from json import *; from builtins import *; from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools
import operator, io, sys, json
exit = quit = sys.exit
"""


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    home = int(sys.argv[2])
    try:
        tasks = shut_in()
    except OSError as error:
        control.send(str(error).encode())
        return
    control.send(READY)
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    sys.setrecursionlimit(RECURSION)
    gc.freeze()  # otherwise a fork's garbage collector would write to all objects, and so copy their pages
    parent = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(control, 4096, 3)
        if not message:
            return  # the other end is closed
        asked = json.loads(message)
        if asked.get("interpreter"):
            if not interpreter_inside.forked(control, files):
                continue
            interpreter_inside.supervise(asked, files, home, tasks, confine)
            return
        report, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            program = confine(asked, files, (home, tell), parent, tasks, cpu_s=asked["cpu_s"])
            break
        for file in (*files, tell):
            os.close(file)
        control.send(json.dumps(outcome(pid, report, asked["wall_s"], asked["idle_s"])).encode())
    run(program, names, asked["function"])


def shut_in() -> int:
    """Drop this process's rights: root becomes nobody, and only the interpreter's files stay readable.

    Returns:
        number of threads that its user already runs (num_tasks).
    """
    die_with_parent(os.getppid())
    sys.path.remove(os.environ["PYTHONPATH"])  # only needed to load this file
    standard = [path for path in sys.path if os.path.isdir(path)]
    modules = [entry.path for path in standard for entry in os.scandir(path) if entry.name not in INSTALLED]
    readable = [path for path in (*modules, *LIBRARIES, *DEVICES) if os.path.exists(path)]
    parent = os.getppid()
    if os.geteuid() == 0:
        become_nobody()
        die_with_parent(parent)  # the change of user has cleared it
    tasks = num_tasks(os.getuid())
    restrict_to_reading(readable, listed=standard)
    os.environ.clear()
    return tasks


def become_nobody() -> None:
    """Give up root's user and groups. Raises OSError if root may not."""
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        raise OSError(
            f"root cannot become nobody ({error}): it lacks CAP_SETUID or CAP_SETGID, or its user namespace "
            "has no other user. Run as another user"
        ) from error


def num_tasks(uid: int) -> int:
    """Count the threads of all processes of a user, as RLIMIT_NPROC does."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid:
                total += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue  # it has ended
    return total


def confine(
    asked: dict[str, Any],
    files: list[int],
    kept: tuple[int, ...],
    parent: int,
    tasks: int,
    *,
    cpu_s: int | None,
) -> str:
    """Drop the fork's other rights, and return the program's text. If that fails, the process ends.

    Args:
        asked: memory_bytes and output_bytes.
        files: program, standard input and standard output.
        kept: the interpreter's directory, the pipe on which a failure is reported, and further files that stay
            open.
        parent: process id of the parent, with which the fork ends.
        tasks: number of threads that the user runs besides.
        cpu_s: limit of its CPU time in seconds; None: its parent limits it.
    """
    home, tell = kept[:2]
    try:
        die_with_parent(parent)
        with open(files[0], encoding="utf-8", closefd=False) as file:
            program = file.read()
        os.dup2(files[1], 0)
        os.dup2(files[2], 1)
        last = 2
        for file_number in sorted(kept):
            os.closerange(last + 1, file_number)
            last = file_number
        os.closerange(last + 1, 65536)
        sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        random.seed(0)  # makes programs that use random numbers reproducible
        limits = {
            **({} if cpu_s is None else {resource.RLIMIT_CPU: cpu_s}),
            resource.RLIMIT_AS: asked["memory_bytes"],
            resource.RLIMIT_FSIZE: asked["output_bytes"],  # its output is the only file that it can write
            resource.RLIMIT_NPROC: tasks + THREADS,
            resource.RLIMIT_NOFILE: max(OPEN_FILES, home + 1),
            resource.RLIMIT_STACK: STACK_BYTES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        for limit, value in limits.items():
            _, highest = resource.getrlimit(limit)
            lower = value if highest == resource.RLIM_INFINITY else min(value, highest)
            resource.setrlimit(limit, (lower, lower))
        no_new_privileges()
        allow_computing_only()
    except BaseException as error:
        os.write(tell, f"{type(error).__name__}: {error}".encode()[:2000])
        os._exit(1)
    os.close(tell)
    return program


def outcome(pid: int, report: int, wall_s: float, idle_s: float) -> dict[str, Any]:
    """Wait for a program, and kill it at its time limit. It cannot have children that outlive it.

    Args:
        pid: the program's process.
        report: the pipe on which it reports why it was not run.
        wall_s, idle_s: as in ProgramLimits.

    Returns:
        "status", as from waitpid, and "idle_s", the seconds that it slept; or "failed", why it was not run.
    """
    began = time.monotonic()
    process = os.pidfd_open(pid)
    with open(report, "rb") as file:
        failed = file.read().decode()
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    idle = 0.0
    left = min(wall_s, idle_s)
    while left > 0 and not waiting.poll(left * 1000):
        lived = time.monotonic() - began
        idle = idle_time(lived, time.clock_gettime(cpu_clock(pid)))
        left = min(wall_s - lived, idle_s - idle)
    if left <= 0:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    if left > 0:
        idle = idle_time(time.monotonic() - began, usage.ru_utime + usage.ru_stime)
    os.close(process)
    return {"failed": failed} if failed else {"status": status, "idle_s": idle}


def idle_time(lived_s: float, cpu_s: float) -> float:
    """Estimate the seconds that a program slept.

    On a busy machine a program also waits for a CPU, and the sandbox cannot read from the kernel for how long.
    So only the time beyond BUSY times its CPU time counts as sleep.

    Args:
        lived_s: seconds since it began.
        cpu_s: its CPU seconds.
    """
    return max(0.0, lived_s - BUSY * cpu_s)


def cpu_clock(pid: int) -> int:
    """Return the clock of a process's CPU time, computed as by clock_getcpuclockid(3)."""
    return ~pid << 3 | 2


def run(program: str, names: dict[str, Any], function: str | None) -> None:
    """Run a program as the main module, or call a function of it.

    The function (a method of the class Solution if there is one) gets its arguments from standard input, a JSON
    list. Its result is the output, as JSON. An error of the program ends the process, as usual.
    """
    main_module = types.ModuleType("__main__" if function is None else "answer")
    main_module.__dict__.update({**names, "__name__": main_module.__name__})
    sys.modules[main_module.__name__] = main_module
    sys.argv[:] = ["answer.py"]
    arguments: list[Any] = []
    output = sys.stdout
    if function is not None:
        arguments = json.load(sys.stdin)
        sys.stdout = sys.stderr  # printed text is not the result
    # The prelude's are those that this process had before confine.
    main_module.__dict__.update(stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)
    exec(compile(program, "answer.py", "exec"), main_module.__dict__)
    if function is not None:
        found = main_module.__dict__
        owner = found["Solution"]() if "Solution" in found else main_module
        json.dump(getattr(owner, function)(*arguments), output)
        output.flush()


if __name__ == "__main__":
    main()
