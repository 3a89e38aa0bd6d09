"""Sandboxed interpreters that keep their variables between calls, from outside."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rolemesh.sandbox.box import ProgramLimits, Sandbox, SandboxUnavailable, memory_file

# Text that differs from process to process: an object's address, and the path of the standard library.
ADDRESS = re.compile(r"(?<= at )0x[0-9a-f]{6,}")
LIBRARY = re.compile(r"/proc/self/fd/\d+(?=/lib)")


@dataclass(frozen=True)
class ProgramOutput:
    """The result of a call.

    Args:
        output: printed text, the repr of a last expression, and the traceback of an error. Addresses of objects
            are replaced by 0x0.
        is_cut: True if the output filled ProgramLimits.output_bytes, so that more may be lost.
        ended: why the interpreter has ended, with all its variables; empty if it has not.
    """

    output: str
    is_cut: bool
    ended: str


class Interpreters:
    """Interpreters of one sandbox, each in a process of its own without rights (docs/reward-guarantees.md).

    They end with `close`, and with this process, however that ends.
    """

    def __init__(self) -> None:
        self._sandbox = Sandbox()
        # The kernel ends the sandbox with the thread that started it, so that thread must go on.
        self._starter = ThreadPoolExecutor(1, "sandbox")

    def start(self) -> None:
        """Start the sandbox. Raises SandboxUnavailable if this machine has none."""
        self._starter.submit(self._sandbox.start).result()

    async def open(self, limits: ProgramLimits) -> Interpreter:
        """Start an interpreter.

        Args:
            limits: of its memory and output, and of the time of each call; idle_s has no effect.

        Raises:
            SandboxUnavailable: it could not be sandboxed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = [memory_file("", sealed=False), memory_file("", sealed=False)]
        for file in files:  # after a truncation a write goes to the new end, not to the old position
            fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
        interpreter = Interpreter(ours, files[0], files[1], limits)
        asked = {"interpreter": 1, "memory_bytes": limits.memory_bytes, "output_bytes": limits.output_bytes}

        def close(_: object) -> None:
            theirs.close()
            interpreter.close()

        sending = self._starter.submit(self._send, asked, [theirs.fileno(), *files])
        try:
            await asyncio.wrap_future(sending)
            theirs.close()
            if failed := (await interpreter.answer()).get("failed"):
                raise SandboxUnavailable(f"an interpreter could not be sandboxed, and did not start: {failed}")
        except BaseException:
            sending.cancel()
            # The thread may still send the descriptors; once closed, their numbers may be in use again.
            sending.add_done_callback(close)
            raise
        return interpreter

    def _send(self, asked: dict[str, int], files: list[int]) -> None:
        self._sandbox.start()
        try:
            self._sandbox.send(asked, files)
        except SandboxUnavailable:  # it has ended; start another
            self._sandbox.start()
            self._sandbox.send(asked, files)

    def close(self) -> None:
        """End the sandbox, with every interpreter in it."""
        self._starter.submit(self._sandbox.close).result()
        self._starter.shutdown()


class Interpreter:
    """An interpreter. Its calls run one after another."""

    def __init__(self, control: socket.socket, code: int, output: int, limits: ProgramLimits) -> None:
        self._control = control
        self._code = code
        self._output = output
        self._limits = limits
        control.setblocking(False)

    async def run(self, code: str) -> ProgramOutput:
        """Run code. If this call is cancelled, close the interpreter.

        Raises:
            SandboxUnavailable: the sandbox's own process has ended.
        """
        limits = self._limits
        os.ftruncate(self._output, 0)
        os.ftruncate(self._code, 0)
        os.write(self._code, code.encode(errors="replace"))
        os.lseek(self._code, 0, os.SEEK_SET)
        loop = asyncio.get_running_loop()
        asked = json.dumps({"cpu_s": limits.cpu_s, "wall_s": limits.wall_s}).encode()
        try:
            await loop.sock_sendall(self._control, asked)
        except OSError as error:
            raise _gone() from error
        ended: str = (await self.answer())["ended"]
        output = os.pread(self._output, limits.output_bytes, 0)
        is_cut = len(output) >= limits.output_bytes
        text = ADDRESS.sub("0x0", LIBRARY.sub("", output.decode(errors="replace")))
        return ProgramOutput(text, is_cut, ended)

    async def answer(self) -> dict[str, str]:
        """Receive the supervisor's next answer. Raises SandboxUnavailable if the supervisor has ended."""
        try:
            message = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
        except ConnectionError as error:
            raise _gone() from error
        if not message:
            raise _gone()
        answer: dict[str, str] = json.loads(message)
        return answer

    def close(self) -> None:
        """End the interpreter, also in the middle of a call."""
        self._control.close()
        for file in (self._code, self._output):
            os.close(file)


def _gone() -> SandboxUnavailable:
    return SandboxUnavailable("the sandbox's own process ended, and the interpreter with it")
