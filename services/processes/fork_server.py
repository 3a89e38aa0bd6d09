"""Forks the processes of roles from one that has imported their code.

A process that begins with `python -m rolemesh serve` imports torch, transformers and its role's code. This
takes seconds of a core and hundreds of MiB. A fork of a process that has imported them takes milliseconds, and
shares their memory. So the command line forks a server before it imports torch or starts a thread. The server
imports the code, and then forks a process for each request, like multiprocessing's fork server. Here a request
is a command line with its environment. The fork behaves as if that command line had started it: it has its own
session and output, and a pipe that closes when the launcher ends.

The server opens no channel, touches no device and computes nothing, because none of that survives a fork. It
ends when the launcher ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from rolemesh.importing import imported
from rolemesh.services.processes.environments import role_settings

log = logging.getLogger(__name__)

NUMBER = struct.Struct("!i")  # the length of a request, a process id, an exit code
ASKING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # signals that ask a process to end
STATUS, STDIN, STDOUT, STDERR = range(4)  # the descriptors of a request


class Forked:
    """A process that the server forked, with the part of asyncio.subprocess.Process that its launcher needs."""

    def __init__(
        self, pid: int, status: asyncio.StreamReader, writer: asyncio.StreamWriter, stdin: int
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._writer = writer
        self._stdin = stdin
        self._ended = asyncio.ensure_future(self._end(status))

    async def wait(self) -> int:
        """Wait for the process to end, and return its exit code; negative: the signal that killed it."""
        return await asyncio.shield(self._ended)

    def close_stdin(self) -> None:
        """Close the write end of its pipe."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    async def _end(self, status: asyncio.StreamReader) -> int:
        try:
            (self.returncode,) = NUMBER.unpack(await status.readexactly(NUMBER.size))
        except (asyncio.IncompleteReadError, ConnectionError):
            log.error(
                "the process that forks roles has ended; process %d is killed, as nobody watches it", self.pid
            )
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.returncode = -signal.SIGKILL
        self.close_stdin()
        self._writer.close()
        assert self.returncode is not None
        return self.returncode


class ForkServer:
    """The launcher's end of the server."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self._control = control
        self.pid = pid

    async def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int | None,
        name: str = "",
    ) -> Forked:
        """Start `rolemesh ARGUMENTS`.

        Args:
            arguments: of the command line.
            environment: all its environment variables.
            output: descriptor for its output; None: this process's output.
            name: shown by `ps -e` and `top`, up to 15 characters; empty: the command.

        Raises:
            OSError: the server is gone, or could not fork.
        """
        status, its_status = socket.socketpair()
        its_stdin, stdin = os.pipe()
        try:
            outputs = (1, 2) if output is None else (output, output)
            socket.send_fds(self._control, [b"."], [its_status.fileno(), its_stdin, *outputs])
            reader, writer = await asyncio.open_unix_connection(sock=status)
        except BaseException:
            os.close(stdin)  # a process that was forked meanwhile ends itself
            status.close()
            raise
        finally:
            its_status.close()
            os.close(its_stdin)
        try:
            name = name or " ".join(arguments[:2])
            asked = {"arguments": list(arguments), "environment": dict(environment), "directory": os.getcwd()}
            request = json.dumps(asked | {"name": name}).encode()
            writer.write(NUMBER.pack(len(request)) + request)
            (pid,) = NUMBER.unpack(await reader.readexactly(NUMBER.size))
        except BaseException as error:
            os.close(stdin)
            writer.close()
            if isinstance(error, asyncio.IncompleteReadError):
                raise ChildProcessError("the process that forks roles is gone, or could not fork") from error
            raise
        return Forked(pid, reader, writer, stdin)

    def close(self) -> None:
        """End the server. Its forks end with this process, when their pipes close."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it may still import
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


server: ForkServer | None = None  # of this process
is_fork = False  # this process was forked by a server, which had done nothing but import


def begin_forking(modules: Sequence[str]) -> None:
    """Start this process's server. Call it before anything starts a thread or computes.

    Args:
        modules: what the processes will import.
    """
    global server
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # of a process that was started with it closed
            stream.flush()
    own, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        own.close()
        serve_forks(its, modules)
    its.close()
    server = ForkServer(own, pid)
    atexit.register(server.close)


def serve_forks(control: socket.socket, modules: Sequence[str]) -> NoReturn:
    """Run the server, and in each fork the requested command. Returns in neither.

    Args:
        control: brings the requests; the launcher has the other end.
        modules: imported first.
    """
    os.setsid()  # Ctrl-C must reach only the launcher
    # It has the launcher's command line. A signal that is sent by that name is meant for the launcher.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ASKING}
    _name("rolemesh forks")
    os.environ.update(role_settings())  # before torch is imported: OpenMP reads them then
    for module in modules:
        with contextlib.suppress(Exception):  # the process that needs it reports the error
            imported(module)
    gc.collect()
    gc.freeze()  # a garbage collection of a fork would write to all of the shared memory
    request = _requested(control)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _become(**request)
    sys.exit(import_module("rolemesh.__main__").main())


def _requested(control: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. Return the request in the fork; the server itself never returns."""
    awake, waking = socket.socketpair()
    for end in (awake, waking):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno())
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, awake], [], [])
        if awake in ready:
            awake.recv(4096)
            _tell_ended(children)
        if control in ready:
            mark, descriptors, _, _ = socket.recv_fds(control, 1, 4)
            if not mark:
                os._exit(0)
            status = socket.socket(fileno=descriptors[STATUS])
            try:
                request: dict[str, Any] = json.loads(_read(status, *NUMBER.unpack(_read(status, NUMBER.size))))
                pid = os.fork()
            except (EOFError, OSError):  # given up, or not forked: its status closes without a pid
                pid = -1
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for mine in (control, awake, waking, status, *children.values()):
                    mine.close()
                return request | {"descriptors": descriptors}
            for descriptor in descriptors[STDIN:]:
                os.close(descriptor)
            if pid > 0:
                with contextlib.suppress(OSError):  # the launcher may be gone
                    status.sendall(NUMBER.pack(pid))
                children[pid] = status
            else:
                status.close()


def _tell_ended(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if reply := children.pop(pid, None):  # None: something that an import started
            with contextlib.suppress(OSError), reply:
                reply.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _read(status: socket.socket, size: int) -> bytes:
    whole = b""
    while len(whole) < size:
        part = status.recv(size - len(whole))
        if not part:
            raise EOFError
        whole += part
    return whole


def _become(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    name: str,
    descriptors: Sequence[int],
) -> None:
    """Turn this fork into the process that `rolemesh ARGUMENTS` would start."""
    global server, is_fork
    server = None
    is_fork = True
    os.setsid()
    os.chdir(directory)
    for number in (STDIN, STDOUT, STDERR):
        os.dup2(descriptors[number], number - STDIN)
    for descriptor in descriptors[STDIN:]:
        if descriptor > 2:
            os.close(descriptor)
    if sys.stdout is not None:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as PYTHONUNBUFFERED has it
    if not sys.flags.safe_path:
        del sys.path[0]  # the command's folder, or the working directory: `python -P` has neither
    num_threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["rolemesh", *arguments]
    _name(name)
    if (own := os.environ.get("OMP_NUM_THREADS", "")) != num_threads and own.isdecimal():
        import_module("torch").set_num_threads(int(own))


def _name(name: str) -> None:
    """Give the process a name for `ps -e` and `top`, which show 15 characters."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name[:15])
