"""The inside of the sandbox: a bare interpreter that shuts itself in and forks for each program.

A fork is quicker than a new interpreter that imports the same, and as good: no program has run in its memory.
What a program is and reads comes as open files that this process never reads, so that no program finds
another's there; right answers never come here at all.

`python -m rolemesh.services.reward.sandbox.inside CONTROL HOME`: two file descriptors, the socket over which
programs come, and the interpreter's own directory, which a process that may no longer walk the path to it still
reads.
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

from rolemesh.services.reward.parent import die_with_parent
from rolemesh.services.reward.sandbox.landlock import no_new_privileges, restrict_to_reading
from rolemesh.services.reward.sandbox.seccomp import allow_computing_only

NOBODY = 65534  # what root becomes
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/urandom")
INSTALLED = ("site-packages", "dist-packages")  # not of the standard library, which they lie in
THREADS = 512  # that programs may have beside what else the user runs; memory ends most of them before
STACK_BYTES = 64 << 20  # of a thread, unless it says another size: deep recursion needs it
OPEN_FILES = 64
RECURSION = 600_000
BUSY = 8
READY = b"ready"

# What is there without being imported, as data sets of this kind expect (APPS, TACO, PRIME). builtins come
# late: by pow a program does not mean math.pow.
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
    control, home = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    try:
        tasks = shut_in()
    except OSError as error:
        control.send(str(error).encode())
        return
    control.send(READY)
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    sys.setrecursionlimit(RECURSION)
    gc.freeze()  # a fork's collector would else write to, and so copy, all that is here
    parent = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(control, 4096, 3)
        if not message:
            return  # whoever asked is gone
        asked = json.loads(message)
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            program = confine(asked, files, (home, tell), parent, tasks)
            break
        for file in (*files, tell):
            os.close(file)
        control.send(json.dumps(outcome(pid, told, asked["wall_s"], asked["idle_s"])).encode())
    run(program, names, asked["function"])


def shut_in() -> int:
    """Takes this process's rights away: from root to nobody, and from all files to the interpreter's own.

    Returns:
        the tasks that its user runs already.
    """
    die_with_parent(os.getppid())
    sys.path.remove(os.environ["PYTHONPATH"])  # where this file is; it is loaded
    standard = [path for path in sys.path if os.path.isdir(path)]
    modules = [entry.path for path in standard for entry in os.scandir(path) if entry.name not in INSTALLED]
    readable = [path for path in (*modules, *LIBRARIES, *DEVICES) if os.path.exists(path)]
    parent = os.getppid()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        die_with_parent(parent)  # another user's process has to say so anew
    tasks = num_tasks(os.getuid())
    restrict_to_reading(readable, listed=standard)
    os.environ.clear()
    return tasks


def num_tasks(uid: int) -> int:
    """Threads of all processes of a user, which is what RLIMIT_NPROC counts."""
    total = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid:
                total += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue  # it has ended
    return total


def confine(asked: dict[str, Any], files: list[int], kept: tuple[int, int], parent: int, tasks: int) -> str:
    """In the fork: all further rights go, and the program is read. Never returns where that fails.

    Args:
        asked: cpu_s, memory_bytes and output_bytes.
        files: program, standard input and standard output.
        kept: the interpreter's directory, and where failure is told.
    """
    home, tell = kept
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
        random.seed(0)  # a program that draws gives the same answer each time
        limits = {
            resource.RLIMIT_CPU: asked["cpu_s"],
            resource.RLIMIT_AS: asked["memory_bytes"],
            resource.RLIMIT_FSIZE: asked["output_bytes"],  # its output is the one file that it can write
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


def outcome(pid: int, told: int, wall_s: float, idle_s: float) -> dict[str, Any]:
    """Waits for a program, and kills it when its time is over. It has no children that could outlive it.

    Args:
        pid: the program's process.
        told: where it tells why it was never run.
        wall_s, idle_s: as Limits has them.

    Returns:
        "status", as waitpid has it, and "idle_s", the seconds it slept; or "failed", why it was never run.
    """
    began, process = time.monotonic(), os.pidfd_open(pid)
    with open(told, "rb") as file:
        failed = file.read().decode()
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    idle, left = 0.0, min(wall_s, idle_s)
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
    """Seconds of its life that a program slept. Up to BUSY times its CPU time it may have computed, or waited
    for a CPU of a busy machine, which the kernel tells nobody in here."""
    return max(0.0, lived_s - BUSY * cpu_s)


def cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, as clock_getcpuclockid(3) makes it of the number."""
    return ~pid << 3 | 2


def run(program: str, names: dict[str, Any], function: str | None) -> None:
    """Runs a program as the main module; or a function of it (of its class Solution, where it has one) on the
    arguments that standard input has as JSON, whose result then is the output, as JSON. How it ends is the
    interpreter's to tell."""
    main_module = types.ModuleType("__main__" if function is None else "answer")
    main_module.__dict__.update({**names, "__name__": main_module.__name__})
    sys.modules[main_module.__name__] = main_module
    sys.argv[:] = ["answer.py"]
    arguments: list[Any] = []
    output = sys.stdout
    if function is not None:
        arguments = json.load(sys.stdin)
        sys.stdout = sys.stderr  # what it prints is no result
    exec(compile(program, "answer.py", "exec"), main_module.__dict__)
    if function is not None:
        found = main_module.__dict__
        owner = found["Solution"]() if "Solution" in found else main_module
        json.dump(getattr(owner, function)(*arguments), output)
        output.flush()


if __name__ == "__main__":
    main()
