"""A pool of processes that score rows in parallel.

Each thread of the pool has its own process, started with the thread's first row. The thread sends the process
one call at a time and waits for its scores. If a process dies or does not answer in time, its call fails, and
the thread starts a new process for its next call, as it does if the process has died between two calls.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.plugin_imports import installed_plugins
from rolemesh.config.reward import RewardConfig
from rolemesh.cpus import usable_cpus
from rolemesh.errors import InvalidConfig, RewardFailed
from rolemesh.process_group import group_that_dies_with_me
from rolemesh.services.reward.scoring_call import RowScore

log = logging.getLogger(__name__)

STARTING_S = 300.0  # at least, to import the function's file; reward.timeout_s begins afterwards
MOST_BY_THEMSELVES = 8  # limit of the default number: a container without a quota may use all CPUs of its node

ENDS_S = 10.0  # for a process that is asked to end
# a message's length; -1 announces a long one
SHORT = struct.Struct("!i")
LONG = struct.Struct("!Q")
MOST_SHORT_BYTES = 0x7FFFFFFF
BLOCK_BYTES = 1 << 16


class ScoringJob(NamedTuple):
    """A call of the reward manager.

    Args:
        rows: indices of the batch's rows that it scores.
        arguments: the reward function's arguments for each of these rows.
    """

    rows: Sequence[int]
    arguments: Sequence[Mapping[str, Any]]


class CallQueue:
    """A queue of calls. Free processes take them in order.

    Args:
        calls: of the reward manager.
        named: returns the name of rows for messages.

    Attributes:
        scores: the scores by row, or the error of the first call in order that failed (RewardFailed if a
            row could not be scored), set once all calls before it have ended. After a failure no further call
            is started.
    """

    def __init__(self, calls: Iterable[ScoringJob], named: Callable[[Sequence[int]], str]) -> None:
        self._left = deque(enumerate(calls))
        self._named = named
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._errors: dict[int, Exception] = {}
        self._found: dict[int, RowScore] = {}
        self.scores: Future[dict[int, RowScore]] = Future()
        self.scores.set_running_or_notify_cancel()  # so that a cancelled caller cannot cancel it
        self._settle()

    def __len__(self) -> int:
        """Number of calls that are not started."""
        return len(self._left)

    def work(self, ask: Callable[[Sequence[Mapping[str, Any]]], list[RowScore]]) -> None:
        """Make calls with `ask` until none is left."""
        while (taken := self._take()) is not None:
            at, call = taken
            try:
                found = dict(zip(call.rows, ask(call.arguments), strict=True))
            except RewardFailed as error:
                self._end(at, {}, RewardFailed(f"{self._named(call.rows)}: {error}"))
            except Exception as error:
                self._end(at, {}, error)
            else:
                self._end(at, found)

    def leave(self) -> None:
        """Drop the calls that are not started."""
        with self._lock:
            self._left.clear()

    def _take(self) -> tuple[int, ScoringJob] | None:
        with self._lock:
            if not self._left:
                return None
            at, call = self._left.popleft()
            self._begun.add(at)
            return at, call

    def _end(self, at: int, found: dict[int, RowScore], error: Exception | None = None) -> None:
        with self._lock:
            self._begun.remove(at)
            self._found |= found
            if error is not None:
                self._errors[at] = error
                self._left.clear()
            self._settle()

    def _settle(self) -> None:
        if self.scores.done():
            return
        first = min(self._errors, default=None)
        if first is not None and first < min(self._begun, default=first + 1):
            self.scores.set_exception(self._errors[first])
        elif first is None and not self._begun and not self._left:
            self.scores.set_result(self._found)


class ScoringPool:
    """The pool of scoring processes of one reward worker.

    Args:
        config: the function, the number of processes, and the timeout of a call.
        plugins: the job's plug-ins, imported by each process.
    """

    def __init__(self, config: RewardConfig, plugins: Sequence[str] = ()) -> None:
        self._config = config
        self._plugins = plugins
        self._number = config.num_workers or min(usable_cpus(), MOST_BY_THEMSELVES)
        self._threads = ThreadPoolExecutor(self._number, thread_name_prefix="scoring")
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._running: set[_ScoringProcess] = set()
        self._closed = False

    def start(self) -> None:
        """Start a first process, to find errors of configuration early.

        Raises:
            InvalidConfig: the custom function cannot be loaded.
        """
        self._threads.submit(self._process_of_thread).result()

    def submit(self, queue: CallQueue) -> None:
        """Make all calls of a queue."""
        for _ in range(min(self._number, len(queue))):
            self._threads.submit(queue.work, self._ask)

    def close(self) -> None:
        """End all processes; rows that are being scored fail."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        self._threads.shutdown(wait=True)  # a thread that takes a call from now on fails it
        for process in self._running:
            process.close()

    def _process_of_thread(self) -> _ScoringProcess:
        """Return this thread's process; start it if there is none."""
        process: _ScoringProcess | None = getattr(self._of_thread, "process", None)
        if process is not None and process.has_ended():  # not by the row that would come to it now
            log.warning("a scoring process ended between two rows; another one is started")
            self._end(process)
            process = None
        if process is None:
            with self._lock:
                if self._closed:
                    raise RewardFailed("the reward role is closing")
                process = _ScoringProcess()
                self._running.add(process)
            self._of_thread.process = process
            starting_s = max(STARTING_S, self._config.timeout_s)
            late = f"the process that should score it did not load the function within {starting_s:g} s"
            try:
                said = process.ask(first_message(self._config, self._plugins), starting_s, late)
            except RewardFailed:
                self._end(process)
                raise
            if said:
                self._end(process)
                raise InvalidConfig(said["invalid"]) if "invalid" in said else RewardFailed(said["failed"])
        return process

    def _ask(self, arguments: Sequence[Mapping[str, Any]]) -> list[RowScore]:
        try:
            message = json.dumps(list(arguments)).encode()
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"the row is not JSON-like: {error}") from error
        process = self._process_of_thread()
        try:
            limit_s = self._config.timeout_s
            said = process.ask(message, limit_s, f"it was not scored within reward.timeout_s, {limit_s:g} s")
        except RewardFailed:
            self._end(process)
            raise
        if "failed" in said:
            raise RewardFailed(said["failed"])
        return [RowScore(**score) for score in said["scores"]]

    def _end(self, process: _ScoringProcess) -> None:
        process.kill()
        process.close()
        with self._lock:
            self._running.discard(process)
        self._of_thread.process = None


def first_message(config: RewardConfig, plugins: Sequence[str]) -> bytes:
    """Make the first message to a scoring process: what it imports and the job's section `reward`.

    Without plug-ins the manager is one of Rolemesh's own. The message has its import path, so the process
    needs no catalog and no pydantic, and starts in a third of the time.
    """
    said: dict[str, Any] = {"reward": config.model_dump(mode="json")}
    if plugins or installed_plugins() or config.manager.origin != BUILT_IN:
        said["plugins"] = list(plugins)
    else:
        said["manager"] = config.manager.code
    return json.dumps(said).encode()


class _ScoringProcess:
    """One scoring process, and the connection to it. What its function starts ends with it."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        module = "rolemesh.services.reward.scoring_process"
        with theirs:
            self._process = subprocess.Popen(
                group_that_dies_with_me((sys.executable, "-P", "-m", module, str(theirs.fileno()))),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # the pool already uses all CPUs
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._asked = 0

    def ask(self, message: bytes, timeout_s: float, late: str) -> dict[str, Any]:
        """Send a message and wait for its answer.

        Args:
            message: JSON.
            timeout_s: how long to wait, whatever the process does: it may not read, or answer in part.
            late: the error's text if there is no answer in time.

        Raises:
            RewardFailed: no answer in time, an answer to another message, or the process ended. The process
                cannot be used any more.
        """
        self._asked += 1
        number = b"%d" % self._asked
        deadline = time.monotonic() + timeout_s
        try:
            self._send(number + b" " + message, deadline)
            answered, _, answer = self._received(deadline).partition(b" ")
        except TimeoutError as error:
            raise RewardFailed(f"{late}; its process was killed") from error
        except (EOFError, OSError) as error:
            raise RewardFailed(f"the process that scored it {self._how_it_ended(deadline)}") from error
        if answered != number:  # otherwise each later row would get the score of another
            raise RewardFailed("the process that scored it sent an answer to another message")
        said: dict[str, Any] = json.loads(answer)
        return said

    # The framing is that of multiprocessing.connection, whose calls have no time limit.

    def _send(self, message: bytes, deadline: float) -> None:
        short = len(message) <= MOST_SHORT_BYTES
        head = SHORT.pack(len(message)) if short else SHORT.pack(-1) + LONG.pack(len(message))
        for part in (head, message):
            self._connection.settimeout(_left(deadline))
            self._connection.sendall(part)

    def _received(self, deadline: float) -> bytes:
        [num_bytes] = SHORT.unpack(self._read(SHORT.size, deadline))
        if num_bytes == -1:
            [num_bytes] = LONG.unpack(self._read(LONG.size, deadline))
        return self._read(num_bytes, deadline)

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < num_bytes:
            self._connection.settimeout(_left(deadline))
            part = self._connection.recv(min(num_bytes - len(found), BLOCK_BYTES))
            if not part:
                raise EOFError
            found += part
        return bytes(found)

    def has_ended(self) -> bool:
        """Return whether the process has closed its connection. It says nothing between two messages."""
        self._connection.setblocking(False)
        try:
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def kill(self) -> None:
        """End the process and what it has started. Calls that wait for it fail."""
        self._process.terminate()
        try:
            self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_S)

    def close(self) -> None:
        self._connection.close()

    def _how_it_ended(self, deadline: float) -> str:
        try:
            code = self._process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "closed its connection; it was killed"
        number = -code if code < 0 else code - 128  # the latter as group_that_dies_with_me tells it
        if number not in signal.valid_signals():
            return f"exited with code {code}"
        return f"was killed by {signal.Signals(number).name}" + " (out of memory?)" * (number == signal.SIGKILL)


def _left(deadline: float) -> float:
    """Return the seconds until a deadline. Raises TimeoutError after it."""
    if (left := deadline - time.monotonic()) > 0:
        return left
    raise TimeoutError
