"""The sandbox from outside: takes programs, and returns their output."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.sandbox.inside import READY

PROJECT = Path(__file__).parents[2]
SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

# A program that tries to escape, and prints its last line only if every attempt is refused. It runs before any
# other.
ESCAPES = """
import ctypes, os, socket, subprocess
def refused(attempt):
    try:
        attempt()
    except PermissionError:
        return
    raise SystemExit(1)
refused(lambda: os.listdir("/"))
refused(lambda: open("/etc/passwd").read())
refused(lambda: open("/proc/self/environ").read())
refused(lambda: open("/tmp/sandbox", "w"))
refused(lambda: socket.socket(socket.AF_INET))
refused(lambda: os.kill(os.getppid(), 0))
refused(os.fork)
print("shut in")
"""


class SandboxUnavailable(RuntimeError):
    """This machine cannot run the sandbox, or the sandbox's process ended. No program was run unprotected."""


@dataclass(frozen=True)
class ProgramLimits:
    """Limits of a program.

    Args:
        cpu_s: CPU time in seconds.
        wall_s: wall time in seconds.
        idle_s: time asleep in seconds.
        memory_bytes: address space, including the interpreter's.
        output_bytes: bytes of output.
    """

    cpu_s: int = 10
    wall_s: float = 20.0
    idle_s: float = 20.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    `status` is 0, its exit code, or minus the signal that ended it. `idle_s` is the time that it slept, in
    seconds.
    """

    status: int
    output: str
    idle_s: float = field(default=0.0, compare=False)


class Sandbox:
    """Runs programs, one at a time, each in a process of its own without rights (docs/reward-guarantees.md).

    The sandbox's process starts with the first program. It ends with `close`, or with the thread that started
    it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(
        self, program: str, stdin: str, limits: ProgramLimits, *, function: str | None = None
    ) -> ProgramResult:
        """Run a program, or call one of its functions.

        Args:
            program: Python.
            stdin: its standard input; with `function` a JSON list of arguments.
            limits: of this run.
            function: the function to call, whose result is the output, as JSON; None: run the program.

        Raises:
            SandboxUnavailable: it could not be sandboxed, and was not run; or the sandbox's process ended.
        """
        self.start()
        return self._run(program, stdin, limits, function)

    def start(self) -> None:
        """Start the sandbox's process unless it runs. Raises SandboxUnavailable if there is no sandbox here."""
        if self._process is None:
            self._start()

    def send(self, asked: dict[str, Any], files: list[int]) -> None:
        """Send a request to the sandbox's process, which has been started.

        Args:
            asked: the request, as inside.py reads it.
            files: descriptors to pass on.

        Raises:
            SandboxUnavailable: the process has ended.
        """
        assert self._control is not None
        try:
            socket.send_fds(self._control, [json.dumps(asked).encode()], files)
        except OSError as error:
            raise self._gone() from error

    def close(self) -> None:
        """End the sandbox and any program that runs in it."""
        if self._process is not None and self._control is not None:
            self._process.kill()
            self._process.wait()
            self._control.close()
        self._process = self._control = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        home = os.open(sys.base_prefix, os.O_PATH)
        files = (theirs.fileno(), home)
        # -S -s -B -P: no site-packages, no packages of the user, no bytecode files, no working directory.
        interpreter: str = sys._base_executable  # type: ignore[attr-defined]
        command = [interpreter, "-S", "-s", "-B", "-P", "-m", "rolemesh.sandbox.inside"]
        try:
            self._control = ours
            self._process = subprocess.Popen(
                [*command, *map(str, files)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={
                    "PYTHONHOME": f"/proc/self/fd/{home}",
                    "PYTHONPATH": str(PROJECT),
                    "PYTHONHASHSEED": "0",  # makes the order of sets reproducible
                },
                pass_fds=files,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(home)
        try:
            if (answer := self._answer()) != READY:
                raise SandboxUnavailable(f"programs cannot be sandboxed here: {answer.decode()}")
            tried = self._run(ESCAPES, "", ProgramLimits(), None)
            if (tried.status, tried.output) != (0, "shut in\n"):
                raise SandboxUnavailable("programs cannot be sandboxed here: a test program could escape")
        except SandboxUnavailable:
            self.close()
            raise

    def _run(self, program: str, stdin: str, limits: ProgramLimits, function: str | None) -> ProgramResult:
        asked = {
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "idle_s": limits.idle_s,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "function": function,
        }
        files = [
            memory_file(program, sealed=True),
            memory_file(stdin, sealed=True),
            memory_file("", sealed=False),
        ]
        try:
            self.send(asked, files)
            answer: dict[str, Any] = json.loads(self._answer())
            if "failed" in answer:
                raise SandboxUnavailable(
                    f"a program could not be sandboxed, and was not run: {answer['failed']}"
                )
            output = os.pread(files[2], limits.output_bytes, 0)
        finally:
            for file in files:
                os.close(file)
        status = os.waitstatus_to_exitcode(answer["status"])
        return ProgramResult(status, output.decode(errors="replace"), answer["idle_s"])

    def _answer(self) -> bytes:
        assert self._control is not None
        answer = self._control.recv(1 << 16)
        if not answer:
            raise self._gone()
        return answer

    def _gone(self) -> SandboxUnavailable:
        assert self._process is not None
        self._process.kill()
        code = self._process.wait()
        self.close()
        return SandboxUnavailable(f"the sandbox's own process ended with {code}; a program was not completed")


def memory_file(text: str, *, sealed: bool) -> int:
    """Make an unnamed file in memory with the text. A sealed file cannot be changed."""
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writing:
        writing.write(text.encode(errors="replace"))
    os.lseek(file, 0, os.SEEK_SET)
    if sealed:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALED)
    return file
