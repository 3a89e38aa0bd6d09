"""A step as it passed: which role answered which call, when it waited and for whom, when it computed.

While a list is in `calls`, whoever makes or answers a call writes it down there: a worker in its own process, a
client for each request to a replica. A server hands what its workers wrote to the client, in seconds since the
request came (`told`, `heard`). Clocks of two machines are never compared: what a server did is laid into the
middle of what its client saw, as if the way there took as long as the way back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

COMPUTES, TRANSFER, WRITES_TRACE = "computes", "transfer", "writes its trace"
SHORTEST_S = 20e-6  # what is shorter is nothing that anybody waited for
CONTROLLER, PHASES = "controller", "controller: phases"


@dataclass(frozen=True)
class Part:
    """What a call was doing for a while; seconds of time.perf_counter."""

    name: str
    began: float
    ended: float


@dataclass
class Call:
    """One call of a method.

    Args:
        where: the row: a role, or a role and its replica's address.
        name: role and method, e.g. "actor.update".
        began, ended: seconds of time.perf_counter.
        waits_for: who has what the call needs before it can compute.
        parts: one after another.
        sizes: rows and tokens.
    """

    where: str
    name: str
    began: float
    ended: float = 0.0
    waits_for: str = ""
    parts: list[Part] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, began: float, ended: float) -> None:
        if ended - began >= SHORTEST_S:
            self.parts.append(Part(part, began, ended))

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """While it is entered, the call does this."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(part, began, time.perf_counter())

    @contextmanager
    def computing(self) -> Iterator[None]:
        """While it is entered, the call computes; until then, it has waited."""
        waited_since = self.parts[-1].ended if self.parts else self.began
        self.add(f"waits for {self.waits_for}", waited_since, time.perf_counter())
        with self.during(COMPUTES):
            yield

    def computed(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, as what the call computes."""

        @wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.computing():
                return function(*args, **kwargs)

        return timed

    def heard(self, told: str) -> None:
        """What the server told, of a request that was sent when the call began, with an answer that has just
        come. What is left of the time is the way there and back, the codec's work included."""
        seconds, parts = json.loads(told)
        at, now = self.began, time.perf_counter()
        arrived = at + max(0.0, now - at - seconds) / 2
        for name, began, ended in parts:
            self.add(TRANSFER, at, arrived + began)
            self.add(name, arrived + began, at := min(arrived + ended, now))
        self.add(TRANSFER, at, now)


calls: ContextVar[list[Call] | None] = ContextVar("calls", default=None)


@contextmanager
def recorded(where: str, name: str, batch: object = None, *, waits_for: str = "") -> Iterator[Call]:
    """A call, written down when it has ended where somebody records."""
    call = Call(where, name, time.perf_counter(), waits_for=waits_for)
    try:
        yield call
    finally:
        call.ended = time.perf_counter()
        if (written := calls.get()) is not None and call.ended - call.began >= SHORTEST_S:
            call.sizes = sizes_of(batch)
            written.append(call)


def told(written: Sequence[Call], began: float) -> str:
    """What a server did for a request that came then, for `Call.heard`."""
    parts = [(p.name, round(p.began - began, 6), round(p.ended - began, 6)) for c in written for p in c.parts]
    return json.dumps([round(time.perf_counter() - began, 6), sorted(parts, key=lambda part: part[1])])


def sizes_of(batch: object) -> dict[str, int]:
    """Rows, and tokens that are no padding."""
    from rolemesh.dataproto import (
        DataProto,
    )  # imports torch; a server starts without

    if not isinstance(batch, DataProto):
        return {}
    for mask in ("attention_mask", "response_mask", "prompt_mask"):
        if mask in batch:
            return {"rows": len(batch), "tokens": int(batch[mask].sum())}
    return {"rows": len(batch)}


# ------------------------------------------------------------------------------------- drawing


def to_chrome(written: Sequence[Call], step: Call) -> dict[str, Any]:
    """A step in Chrome's trace format, which Perfetto reads: microseconds since 1970 by the controller's clock.

    Each place is a group of rows: what it computed, and below it the calls as those who made them saw them, on
    as many rows as were under way at once. What goes beyond the step is cut off there.
    """
    since_1970 = time.time() - time.perf_counter()
    events: list[dict[str, Any]] = []

    def draw(group: int, row: int, name: str, began: float, ended: float, **args: object) -> None:
        # Whole microseconds: slices that touch go on touching.
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
        working.sort(key=lambda pair: pair[1].began)
        rows = _side_by_side([(part.began, part.ended) for _, part in working])
        for row, (call, part) in zip(rows, working, strict=True):
            labels[row] = COMPUTES
            draw(group, row, call.name, part.began, part.ended, **call.sizes)
        first = len(labels)
        for row, call in zip(_side_by_side([(c.began, c.ended) for c in mine]), mine, strict=True):
            labels[first + row] = "calls"
            draw(group, first + row, call.name, call.began, call.ended, **call.sizes)
            for part in call.parts:
                draw(group, first + row, part.name, part.began, part.ended)
        events += [_named("process_name", group, 0, place), _ordered(group)]
        events += [_named("thread_name", group, row, label) for row, label in labels.items()]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _side_by_side(spans: Sequence[tuple[float, float]]) -> list[int]:
    """The row of each span, sorted by their begins: the first on which nothing is under way."""
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
