"""What a role's models do in chosen steps, operation by operation: torch's profiler around its calls.

A trace is `<run directory>/profile/step_<n>/<role>.json.gz`, in Chrome's format; of a role that may have
replicas each has its own, with its machine's name and process number. It is whole after every call.
"""

from __future__ import annotations

import json
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

from rolemesh.config import JobConfig
from rolemesh.config.placement import ReplicasConfig
from rolemesh.home import Home

P = ParamSpec("P")
R = TypeVar("R")

BEGIN, SEPARATOR, END = b'{"displayTimeUnit": "ms", "traceEvents": [\n', b",\n", b"\n]}\n"
GZIP = 31  # zlib's wbits for it
# torch has one profiler in a process: roles that share one are traced in turn.
_TURN = threading.Lock()
_NAMES: Counter[str] = Counter()  # how many traces of this process have had a name


@cache
def _load_profiler() -> None:
    """torch takes seconds for the first profile, and complains where it is made on another thread than the one
    that imported torch."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else a line for each start and stop
    with profile():
        pass


class Traces:
    """The traces of one role in one process. `begin`, `end` and what is `labelled` belong on its worker's
    thread, which is the one that torch looks at.

    Args:
        job: says which steps, and where.
        role: whose they are.
    """

    def __init__(self, job: JobConfig, role: str) -> None:
        self._job, self._role, self.steps = job, role, frozenset(job.trainer.profile_steps)
        self._home = Home.of(job)
        replica = f"-{socket.gethostname()}-{os.getpid()}" if role in ReplicasConfig.model_fields else ""
        name = f"{role}{replica}"
        _NAMES[name] += 1  # a process may hold several replicas: no two may write one file
        self._name = f"{name}-{_NAMES[name]}.json.gz" if replica and _NAMES[name] > 1 else f"{name}.json.gz"
        # By step: its file's one gzip stream up to the last event, and how many bytes of the file that is.
        self._streams: dict[int, tuple[Any, int]] = {}
        self._profile: profile | None = None
        self._num_calls = 0

    @classmethod
    def of(cls, job: JobConfig, role: str) -> Traces | None:
        """None where the job traces no step."""
        if not job.trainer.profile_steps:
            return None
        _load_profiler()
        return cls(job, role)

    def begin(self) -> None:
        """A call begins. Of several at once the first starts the profiler, the last stops it."""
        self._num_calls += 1
        if self._num_calls == 1:
            _TURN.acquire()
            self._profile = profile()
            self._profile.start()

    def end(self, step: int) -> None:
        """A call has ended."""
        self._num_calls -= 1
        if self._num_calls:
            return
        assert self._profile is not None
        try:
            self._profile.stop()
            self._append(self._profile, step)
        finally:
            self._profile = None
            _TURN.release()

    def labelled(self, method: str, function: Callable[P, R]) -> Callable[P, R]:
        """The function, as a slice of its own where it is traced."""

        @wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with record_function(f"{self._role}.{method}"):
                return function(*args, **kwargs)

        return traced if self._profile else function

    def _append(self, session: profile, step: int) -> None:
        """Lays the session's events to those of the step that are there, if they are of this process."""
        with tempfile.TemporaryDirectory() as scratch:
            exported = Path(scratch) / "trace.json"
            session.export_chrome_trace(str(exported))
            trace = json.loads(exported.read_text(encoding="utf-8"))
        events = [json.dumps(event).encode() for event in map(self._since_1970(trace), trace["traceEvents"])]
        stream, size = self._streams.get(step) or (zlib.compressobj(3, wbits=GZIP), 0)
        before = SEPARATOR if size else BEGIN
        body = stream.compress(before + SEPARATOR.join(events)) + stream.flush(zlib.Z_SYNC_FLUSH)
        ending = stream.copy()  # the stream itself goes on
        with self._home.file(self._job.profile_dir(step) / self._name) as file:
            file.seek(size)
            file.write(body + ending.compress(END) + ending.flush())
            file.truncate()
        self._streams[step] = stream, size + len(body)

    def _since_1970(self, trace: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """An event in microseconds since 1970, as in the step's timeline, and the process named by its role."""
        base = trace.get("baseTimeNanoseconds", 0) / 1e3

        def shifted(event: dict[str, Any]) -> dict[str, Any]:
            if event.get("name") == "process_name" and event["pid"] == os.getpid():
                return event | {"args": {"name": self._role}}
            return event | {"ts": event["ts"] + base} if "ts" in event else event

        return shifted
