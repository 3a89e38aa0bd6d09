"""The sandbox from outside: programs go in, and what they wrote comes out."""

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

from rolemesh.services.reward.sandbox.inside import READY

PROJECT = Path(__file__).parents[4]
SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

# Tried before anything else is run: each line must fail, and only then is it said that they did.
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
    """There is no sandbox on this machine, or its own process ended. No program was run unprotected."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Args:
        cpu_s: seconds of CPU.
        wall_s: seconds, asleep or not.
        idle_s: seconds asleep.
        memory_bytes: of address space, the interpreter's included.
        output_bytes: that it may write.
    """

    cpu_s: int = 10
    wall_s: float = 20.0
    idle_s: float = 20.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """How a program ended: `status` is 0, its exit code, or minus the signal that ended it. It slept `idle_s`
    seconds."""

    status: int
    output: str
    idle_s: float = field(default=0.0, compare=False)


class Sandbox:
    """Runs programs, one at a time, each in a process of its own without rights: see docs/rewards.md.

    Its own process starts with the first program and ends with `close`, or with the thread that made it start.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def run(self, program: str, stdin: str, limits: Limits, *, function: str | None = None) -> Outcome:
        """Runs a program, or with `function` that function of it on the arguments that stdin has as JSON.

        Raises:
            SandboxUnavailable: it could not be run shut in, and was not run.
        """
        if self._process is None:
            self._start()
        return self._run(program, stdin, limits, function)

    def close(self) -> None:
        """Ends the sandbox, and a program in it."""
        if self._process is not None and self._control is not None:
            self._process.kill()
            self._process.wait()
            self._control.close()
        self._process = self._control = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        home = os.open(sys.base_prefix, os.O_PATH)
        files = (theirs.fileno(), home)
        # -S -s -B -P: neither site-packages nor the user's own, no bytecode written, not the working directory.
        interpreter: str = sys._base_executable  # type: ignore[attr-defined]
        command = [interpreter, *("-S", "-s", "-B", "-P", "-m", "rolemesh.services.reward.sandbox.inside")]
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
                    "PYTHONHASHSEED": "0",  # the order of a set is the same each time
                },
                pass_fds=files,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(home)
        try:
            if (said := self._answer()) != READY:
                raise SandboxUnavailable(f"programs cannot be shut in here: {said.decode()}")
            tried = self._run(ESCAPES, "", Limits(), None)
            if (tried.status, tried.output) != (0, "shut in\n"):
                raise SandboxUnavailable("programs cannot be shut in here: one that tried to get out got out")
        except SandboxUnavailable:
            self.close()
            raise

    def _run(self, program: str, stdin: str, limits: Limits, function: str | None) -> Outcome:
        assert self._control is not None
        asked = {
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "idle_s": limits.idle_s,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "function": function,
        }
        files = [_file(program, sealed=True), _file(stdin, sealed=True), _file("", sealed=False)]
        try:
            try:
                socket.send_fds(self._control, [json.dumps(asked).encode()], files)
            except OSError as error:
                raise self._gone() from error
            answer: dict[str, Any] = json.loads(self._answer())
            if "failed" in answer:
                raise SandboxUnavailable(f"a program could not be shut in, and was not run: {answer['failed']}")
            output = os.pread(files[2], limits.output_bytes, 0)
        finally:
            for file in files:
                os.close(file)
        status = os.waitstatus_to_exitcode(answer["status"])
        return Outcome(status, output.decode(errors="replace"), answer["idle_s"])

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
        return SandboxUnavailable(
            f"the sandbox's own process ended with {code}; a program was not run to its end"
        )


def _file(text: str, *, sealed: bool) -> int:
    """Text as an open file in memory, of no name; sealed: nobody can change it."""
    file = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writing:
        writing.write(text.encode(errors="replace"))
    os.lseek(file, 0, os.SEEK_SET)
    if sealed:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALED)
    return file
