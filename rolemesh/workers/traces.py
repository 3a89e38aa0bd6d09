"""Trace the operations of a role's models in chosen steps, with torch's profiler.

A trace is `<run directory>/profile/step_<n>/<role>.json.gz`, in Chrome's format. Each replica of a role that
may have several writes its own file, named with its machine and process number; so does each rank above 0 of a
role, named with its rank. The file is valid after every call whose events could be written.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch.profiler import profile, record_function

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.home import Home
from rolemesh.telemetry import context

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

BEGIN = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
SEPARATOR = b",\n"
END = b"\n]}\n"
GZIP = 31  # zlib's wbits for gzip
# torch has one profiler per process, so roles that share a process are traced one at a time.
_TURN = threading.Lock()
_NAMES: Counter[str] = Counter()  # the number of traces with each name in this process


@cache
def _load_profiler() -> None:
    """Make a first, empty profile.

    It takes seconds, and torch warns if another thread than the one that imported torch makes it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs a line for each start and stop
    with profile():
        pass


class Traces:
    """The traces of one role in one process.

    Call `begin`, `end` and functions returned by `labelled` on the worker's thread: torch profiles that thread.

    Args:
        job: has the steps and the directory.
        role: the traced role.
    """

    def __init__(self, job: JobConfig, role: str) -> None:
        self._job = job
        self._role = role
        self.steps = frozenset(job.trainer.profile_steps)
        self._home = Home.of(job)
        replica = f"-{socket.gethostname()}-{os.getpid()}" if not ROLES[role].trained else ""
        rank = context.rank.get()
        name = f"{role}{replica}" + (f"-rank-{rank}" if rank else "")
        _NAMES[name] += 1  # a process may hold several replicas, which must not write the same file
        self._name = f"{name}-{_NAMES[name]}.json.gz" if replica and _NAMES[name] > 1 else f"{name}.json.gz"
        # By step: the gzip stream of its file up to the last event, and the number of bytes written so far.
        self._streams: dict[int, tuple[Any, int]] = {}
        self._profile: profile | None = None
        self._num_calls = 0

    @classmethod
    def of(cls, job: JobConfig, role: str) -> Traces | None:
        """Make a role's traces; None if the job traces no step."""
        if not job.trainer.profile_steps:
            return None
        _load_profiler()
        return cls(job, role)

    def begin(self) -> None:
        """Begin a call. Of concurrent calls, the first starts the profiler and the last stops it."""
        self._num_calls += 1
        if self._num_calls == 1:
            session = profile()
            _TURN.acquire()
            self._profile = session
            session.start()

    def end(self, step: int) -> None:
        """End a call. The last of concurrent calls writes the trace of the step, or logs why it cannot."""
        self._num_calls -= 1
        if self._num_calls or self._profile is None:  # None: it could not be made
            return
        try:
            self._profile.stop()
            self._append(self._profile, step)
        # The call was made, and an update cannot be made again. ValueError: the profiler's file is cut off.
        except (OSError, ValueError) as error:
            log.warning("the trace %s/%s was not written: %s", self._job.profile_dir(step), self._name, error)
        finally:
            self._profile = None
            _TURN.release()

    def labelled(self, method: str, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that it has its own slice in the trace; return it unchanged if not tracing."""

        @wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with record_function(f"{self._role}.{method}"):
                return function(*args, **kwargs)

        return traced if self._profile else function

    def _append(self, session: profile, step: int) -> None:
        """Append the session's events to the step's file, which keeps events of this process only."""
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / "trace.json"
            session.export_chrome_trace(str(exported))
            trace = json.loads(exported.read_text(encoding="utf-8"))
        events = [json.dumps(event).encode() for event in map(self._since_1970(trace), trace["traceEvents"])]
        written, size = self._streams.get(step) or (zlib.compressobj(3, wbits=GZIP), 0)
        stream = written.copy()  # a copy: if this fails, the next call appends to what is in the file
        before = SEPARATOR if size else BEGIN
        body = stream.compress(before + SEPARATOR.join(events)) + stream.flush(zlib.Z_SYNC_FLUSH)
        ending = stream.copy()  # a copy, so that the stream can be continued
        with self._home.file(self._job.profile_dir(step) / self._name) as file:
            file.seek(size)
            file.write(body + ending.compress(END) + ending.flush())
            file.truncate()
        self._streams[step] = stream, size + len(body)

    def _since_1970(self, trace: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """Return a function that converts an event's time to microseconds since 1970, as in the timeline.

        It also names the process after its role.
        """
        base = trace.get("baseTimeNanoseconds", 0) / 1e3

        def shifted(event: dict[str, Any]) -> dict[str, Any]:
            if event.get("name") == "process_name" and event["pid"] == os.getpid():
                return event | {"args": {"name": self._role}}
            return event | {"ts": event["ts"] + base} if "ts" in event else event

        return shifted
