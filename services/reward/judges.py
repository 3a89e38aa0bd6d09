"""Judges: processes that score rows, as many as run at the same time.

Each thread of the pool has a process of its own, started with the thread's first row, and waits for it; when it
has the verdict on a row it takes the next. A process that dies or does not answer in time costs the row that it
had; the thread's next row gets a new one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rolemesh.config.reward import RewardConfig
from rolemesh.errors import InvalidConfig, RewardFailed
from rolemesh.services.reward.verdict import Verdict

MOST_BY_THEMSELVES = 8  # a container sees all CPUs of its node, whatever its share of them


class Call(NamedTuple):
    """A call of the function, with what it says of one row or of several."""

    rows: Sequence[int]
    arguments: Mapping[str, Any]


class Line:
    """Calls that judges take in their order, each when it is free.

    Args:
        calls: of the function.
        named: what an error calls rows.

    Attributes:
        verdicts: by row; or the error of the first call that failed, as soon as all before it have ended.
            RewardFailed where a row could not be scored. Nobody begins with another then.
    """

    def __init__(self, calls: Iterable[Call], named: Callable[[Sequence[int]], str]) -> None:
        self._left, self._named = deque(enumerate(calls)), named
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self._errors: dict[int, Exception] = {}
        self._found: dict[int, Verdict] = {}
        self.verdicts: Future[dict[int, Verdict]] = Future()
        self.verdicts.set_running_or_notify_cancel()  # a caller who no longer waits cancels nothing but that
        self._settle()

    def __len__(self) -> int:
        """Calls that nobody has begun with."""
        return len(self._left)

    def work(self, ask: Callable[[Mapping[str, Any]], list[Verdict]]) -> None:
        """Makes calls until none is left."""
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
        """Nobody begins with another."""
        with self._lock:
            self._left.clear()

    def _take(self) -> tuple[int, Call] | None:
        with self._lock:
            if not self._left:
                return None
            at, call = self._left.popleft()
            self._begun.add(at)
            return at, call

    def _end(self, at: int, found: dict[int, Verdict], error: Exception | None = None) -> None:
        with self._lock:
            self._begun.remove(at)
            self._found |= found
            if error is not None:
                self._errors[at] = error
                self._left.clear()
            self._settle()

    def _settle(self) -> None:
        if self.verdicts.done():
            return
        first = min(self._errors, default=None)
        if first is not None and first < min(self._begun, default=first + 1):
            self.verdicts.set_exception(self._errors[first])
        elif first is None and not self._begun and not self._left:
            self.verdicts.set_result(self._found)


class Judges:
    """The pool of one reward worker.

    Args:
        config: which function they score by, how many they are and how long each may take.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._number = config.num_workers or min(len(os.sched_getaffinity(0)), MOST_BY_THEMSELVES)
        self._threads = ThreadPoolExecutor(self._number, thread_name_prefix="judge")
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._running: set[_Judge] = set()
        self._closed = False

    def start(self) -> None:
        """Starts the first one, to find out whether it can be.

        Raises:
            InvalidConfig: the custom function cannot be loaded.
        """
        self._threads.submit(self._judge).result()

    def submit(self, line: Line) -> None:
        """Has all calls of the line made."""
        for _ in range(min(self._number, len(line))):
            self._threads.submit(line.work, self._ask)

    def close(self) -> None:
        """Ends all; rows that are being scored fail."""
        with self._lock:
            self._closed = True
            for judge in self._running:
                judge.kill()
        self._threads.shutdown(wait=True)  # who comes to a line now fails its first call

    def _judge(self) -> _Judge:
        """This thread's process."""
        judge: _Judge | None = getattr(self._of_thread, "judge", None)
        if judge is None:
            with self._lock:
                if self._closed:
                    raise RewardFailed("the reward role is being closed")
                judge = _Judge()
                self._running.add(judge)
            self._of_thread.judge = judge
            try:
                said = judge.ask(self._config.model_dump_json().encode(), self._config.timeout_s)
            except RewardFailed:
                self._end(judge)
                raise
            if "invalid" in said:
                self._end(judge)
                raise InvalidConfig(said["invalid"])
        return judge

    def _ask(self, arguments: Mapping[str, Any]) -> list[Verdict]:
        try:
            message = json.dumps(arguments).encode()
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"the row is not JSON-like: {error}") from error
        judge = self._judge()
        try:
            said = judge.ask(message, self._config.timeout_s)
        except RewardFailed:
            self._end(judge)
            raise
        if "failed" in said:
            raise RewardFailed(said["failed"])
        return [Verdict(**verdict) for verdict in said["verdicts"]]

    def _end(self, judge: _Judge) -> None:
        judge.kill()
        with self._lock:
            self._running.discard(judge)
        self._of_thread.judge = None


class _Judge:
    """One process, and the line to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "rolemesh.services.reward.judge",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # there are as many judges as CPUs
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._asked = 0

    def ask(self, message: bytes, timeout_s: float) -> dict[str, Any]:
        """Sends and waits.

        Raises:
            RewardFailed: no answer in time, one to another message, or the process ended. It is of no more use.
        """
        self._asked += 1
        number = b"%d" % self._asked
        try:
            self._connection.send_bytes(number + b" " + message)
            if not self._connection.poll(timeout_s):
                raise RewardFailed(
                    f"it was not scored within reward.timeout_s, {timeout_s:g} s, and was given up"
                )
            answered, _, answer = self._connection.recv_bytes().partition(b" ")
        except (EOFError, OSError) as error:
            raise RewardFailed(f"the process that scored it {self._fate()}") from error
        if answered != number:  # else each later row would have the score of the one before
            raise RewardFailed("an answer that was not to it came from the process that scored it")
        said: dict[str, Any] = json.loads(answer)
        return said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _fate(self) -> str:
        code = self._process.wait()
        if code >= 0:
            return f"ended itself with exit code {code}"
        return f"was ended by {signal.Signals(-code).name}" + " (out of memory?)" * (code == -signal.SIGKILL)
