"""Records the timeline of a step: when each call of each role waited, for what, and when it computed.

While the context variable `calls` holds a list, every call is appended to it: by a worker in its own process,
and by a client for each request to a replica. A server returns its workers' records to the client, in seconds
since the request arrived (`report_of`, `heard`). Clocks of two machines are never compared. The client places
the server's times in the middle of its own call, as if the way there took as long as the way back.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

COMPUTES = "computes"
TRANSFER = "transfer"
WRITES_TRACE = "writes its trace"
COLLECTIVES = "collectives"
SHORTEST_S = 20e-6  # shorter calls and parts are not recorded
MOST_PARTS = 2000  # of a server's report, which is metadata of its answer; each takes up to 80 bytes
CONTROLLER = "controller"
PHASES = "controller: phases"


@dataclass(frozen=True)
class Part:
    """One activity of a call, or of one of a role's ranks in it; times are seconds of time.perf_counter."""

    name: str
    began: float
    ended: float
    rank: int | None = None


@dataclass
class TimedCall:
    """One call of a method.

    Args:
        where: place in the drawing: a role, or a role and its replica's address.
        name: role and method, e.g. "actor.update".
        began, ended: seconds of time.perf_counter.
        waits_for: the role whose turn the call waits for: the one on the shared device, or its own.
        parts: the call's activities, one after another.
        sizes: number of rows and tokens.
    """

    where: str
    name: str
    began: float
    ended: float = 0.0
    waits_for: str = ""
    parts: list[Part] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, began: float, ended: float, rank: int | None = None) -> None:
        if ended - began >= SHORTEST_S:
            self.parts.append(Part(part, began, ended, rank))

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Record the block as a part of the call."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, began, time.perf_counter())

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Record the block as computing, and the time between the last part and the block as waiting."""
        waited_since = self.parts[-1].ended if self.parts else self.began
        self.add(f"waits for {self.waits_for}", waited_since, time.perf_counter())
        with self.during(COMPUTES):
            yield

    def computed(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap a function so that its run is recorded as computing."""

        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.computing():
                return function(*args, **kwargs)

        return timed

    def heard(self, report: str) -> None:
        """Add the parts that a server reported for this call, which has just been answered.

        The rest of the time is recorded as transfer, in both directions. It includes the codec's work.

        Args:
            report: from `report_of`.
        """
        try:
            seconds, parts = _parsed(report)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # it is only drawn
            log.warning("%s: its timeline of %s cannot be read: %s", self.where, self.name, error)
            return
        at = self.began
        now = time.perf_counter()
        arrived = at + max(0.0, now - at - seconds) / 2
        for name, began, ended, rank in parts:
            if rank is None:
                self.add(TRANSFER, at, arrived + began)
            ends = min(arrived + ended, now)
            self.add(name, arrived + began, ends, rank)
            at = ends if rank is None else at
        self.add(TRANSFER, at, now)


calls: ContextVar[list[TimedCall] | None] = ContextVar("calls", default=None)
_current: ContextVar[TimedCall | None] = ContextVar(
    "_current", default=None
)  # the innermost call that is recorded


@contextmanager
def recorded(where: str, name: str, batch: object = None, *, waits_for: str = "") -> Iterator[TimedCall]:
    """Wrap a call. When it ends, append it to `calls`, unless nothing is recorded or it was too short."""
    call = TimedCall(where, name, time.perf_counter(), waits_for=waits_for)
    outer = _current.get()
    _current.set(call)
    try:
        yield call
    finally:
        if _current.get() is call:  # not if a generator is closed in another context than it ran in
            _current.set(outer)
        call.ended = time.perf_counter()
        if (written := calls.get()) is not None and call.ended - call.began >= SHORTEST_S:
            call.sizes = sizes_of(batch)
            written.append(call)


def add_ranks(began: float, seconds: Sequence[tuple[float, float]]) -> None:
    """Record in the running call what each rank did in a command that began at `began`.

    Clocks of two ranks are never compared, so all are drawn as if they began when rank 0 did. A
    rank's collectives are drawn as one part after its computing, although the two alternate.

    Args:
        began: seconds of time.perf_counter.
        seconds: for each rank, the command's seconds and how many of these it spent in collectives.
    """
    if (call := _current.get()) is None or calls.get() is None:
        return
    for rank, (whole, waited) in enumerate(seconds):
        call.add(COMPUTES, began, began + whole - waited, rank)
        call.add(COLLECTIVES, began + whole - waited, began + whole, rank)


def report_of(written: Sequence[TimedCall], began: float) -> str:
    """Report a server's parts for a request that arrived at `began`, as JSON for `TimedCall.heard`.

    Of more than MOST_PARTS the shortest of ranks are left out: an update has two for each rank and mini-batch.
    """
    all_parts = [part for call in written for part in call.parts]
    all_parts.sort(key=lambda part: (part.rank is not None, part.began - part.ended))
    parts = [
        (p.name, round(p.began - began, 6), round(p.ended - began, 6), p.rank) for p in all_parts[:MOST_PARTS]
    ]
    return json.dumps([round(time.perf_counter() - began, 6), sorted(parts, key=lambda part: part[1])])


def _parsed(report: str) -> tuple[float, list[tuple[str, float, float, int | None]]]:
    """Read a report. Raises ValueError, TypeError, OverflowError or RecursionError if it is none."""
    seconds, rows = json.loads(report)
    parts = [
        (str(name), float(began), float(ended), None if rank is None else int(rank))
        for name, began, ended, rank in list(rows)[:MOST_PARTS]
    ]
    if not all(map(math.isfinite, (seconds, *(time for part in parts for time in part[1:3])))):
        raise ValueError("a time is not finite")
    return float(seconds), parts


def sizes_of(batch: object) -> dict[str, int]:
    """Count a batch's rows, and its tokens without padding."""
    from rolemesh.dataproto import DataProto  # here: it imports torch, and a controller's server starts without

    if not isinstance(batch, DataProto):
        return {}
    for mask in ("attention_mask", "response_mask", "prompt_mask"):
        if mask in batch:
            return {"rows": len(batch), "tokens": int(batch[mask].sum())}
    return {"rows": len(batch)}


# ------------------------------------------------------------------------------------- drawing


def to_chrome(written: Sequence[TimedCall], step: TimedCall) -> dict[str, Any]:
    """Convert a step to Chrome's trace format, which Perfetto reads.

    Times are microseconds since 1970 by the controller's clock. Each place is a group of rows. Its first rows
    are its computations. Then come those of its ranks, if it has several, and then the calls as their callers
    saw them. Calls that overlap have rows of their own. Everything is cut off at the step's begin and end.

    Args:
        written: the step's calls.
        step: the step itself, as a call.
    """
    since_1970 = time.time() - time.perf_counter()
    events: list[dict[str, Any]] = []

    def draw(group: int, row: int, name: str, began: float, ended: float, **args: object) -> None:
        # Round both ends to whole microseconds, so that adjacent slices stay adjacent.
        start, end = (round((since_1970 + min(max(t, step.began), step.ended)) * 1e6) for t in (began, ended))
        if start < end:
            at = {"pid": group, "tid": row, "ts": start, "dur": end - start}
            events.append({"ph": "X", "cat": "call", "name": name, **at, "args": args})

    places = sorted(
        {call.where for call in written} | {CONTROLLER}, key=lambda p: (not p.startswith(CONTROLLER), p)
    )
    for group, place in enumerate(places, 1):
        mine = sorted((call for call in written if call.where == place), key=lambda call: call.began)
        labels = {0: "steps" if place == CONTROLLER else COMPUTES}
        if place == CONTROLLER:
            draw(group, 0, step.name, step.began, step.ended)
        working = [(call, part) for call in mine for part in call.parts if part.name == COMPUTES]
        working = sorted((pair for pair in working if pair[1].rank is None), key=lambda pair: pair[1].began)
        rows = _side_by_side([(part.began, part.ended) for _, part in working])
        for row, (call, part) in zip(rows, working, strict=True):
            labels[row] = COMPUTES
            draw(group, row, call.name, part.began, part.ended, **call.sizes)
        of_ranks = [(part.rank, call, part) for call in mine for part in call.parts if part.rank is not None]
        first = len(labels)
        for rank, call, part in of_ranks:
            labels[first + rank] = f"rank {rank}"
            name = call.name if part.name == COMPUTES else part.name
            draw(group, first + rank, name, part.began, part.ended)
        first = len(labels)
        for row, call in zip(_side_by_side([(c.began, c.ended) for c in mine]), mine, strict=True):
            labels[first + row] = "calls"
            draw(group, first + row, call.name, call.began, call.ended, **call.sizes)
            for part in call.parts:
                if part.rank is None:
                    draw(group, first + row, part.name, part.began, part.ended)
        events += [_named("process_name", group, 0, place), _ordered(group)]
        events += [_named("thread_name", group, row, label) for row, label in labels.items()]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _side_by_side(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Assign each span, sorted by start, to the first row that is free then."""
    ends: list[float] = []
    rows = []
    for began, ended in spans:
        row = next((i for i, end in enumerate(ends) if end <= began), len(ends))
        ends[row : row + 1] = [ended]
        rows.append(row)
    return rows


def _named(what: str, group: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": group, "tid": row, "args": {"name": name}}


def _ordered(group: int) -> dict[str, Any]:
    return {"ph": "M", "name": "process_sort_index", "pid": group, "args": {"sort_index": group}}
