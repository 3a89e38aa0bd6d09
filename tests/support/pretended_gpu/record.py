"""Counts of what a pretended GPU was asked to do, by the line that asked."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, NamedTuple

import torch

TESTS = Path(__file__).parents[2]
OUR_FOLDERS = ("rolemesh", "services")
LIBRARIES = ("transformers", "peft")
SHOWN = 12  # lines of a failure


class Event(NamedTuple):
    """One kind of work, asked for by one line.

    Args:
        kind: kernel, to device, to host, wait, cast, cast of a weight, or attention.
        name: of the operation; of a cast, both types; of attention, the kernel that computes it.
        where: file and line of ours, and of transformers if it asked on our behalf.
    """

    kind: str
    name: str
    where: str


@dataclass(frozen=True)
class Budget:
    """The most that one call may do.

    Args:
        kernels: launched.
        to_device, to_host: copies.
        to_device_bytes, to_host_bytes: of them all.
        waits: of the CPU for the GPU, besides copies.
        casts: to another dtype, except of a model's weights.
        weight_casts: of a model's weights.
    """

    kernels: int
    to_device: int
    to_device_bytes: int
    to_host: int
    to_host_bytes: int
    waits: int
    casts: int
    weight_casts: int


# The kind of events that each limit is about.
KINDS = {
    "kernels": "kernel",
    "to_device": "to device",
    "to_device_bytes": "to device",
    "to_host": "to host",
    "to_host_bytes": "to host",
    "waits": "wait",
    "casts": "cast",
    "weight_casts": "cast of a weight",
}


class Record:
    """What was done since the last `clear`.

    Attributes:
        events: how often each happened.
        bytes: that the copies among them moved.
    """

    def __init__(self) -> None:
        self.events: Counter[Event] = Counter()
        self.bytes: Counter[Event] = Counter()

    def clear(self) -> None:
        self.events.clear()
        self.bytes.clear()

    def add(self, kind: str, name: str, num_bytes: int = 0) -> None:
        event = Event(kind, name, where())
        self.events[event] += 1
        if num_bytes:
            self.bytes[event] += num_bytes

    def number(self, kind: str, name: str = "") -> int:
        """Return how often events of a kind happened, or those of one name."""
        return sum(n for event, n in self.events.items() if event.kind == kind and name in ("", event.name))

    def names(self, kind: str) -> dict[str, int]:
        """Return how often each name of a kind happened."""
        names: Counter[str] = Counter()
        for event, n in self.events.items():
            names[event.name] += n if event.kind == kind else 0
        return dict(+names)

    def lines(self, kind: str) -> str:
        """Return the lines that asked for events of a kind, the most frequent first."""
        found: Counter[tuple[str, str]] = Counter()
        for event, n in self.events.items():
            found[event.name, event.where] += n if event.kind == kind else 0
        shown = (+found).most_common(SHOWN)
        left = len(+found) - len(shown)
        rows = [f"  {n:5} {name:32} {where}" for (name, where), n in shown]
        return "\n".join([*rows, *([f"        and {left} other lines"] if left else [])])

    def spent(self) -> Budget:
        """Return what was done, as a budget that has nothing left."""
        return Budget(
            kernels=self.number("kernel"),
            to_device=self.number("to device"),
            to_device_bytes=self._bytes("to device"),
            to_host=self.number("to host"),
            to_host_bytes=self._bytes("to host"),
            waits=self.number("wait"),
            casts=self.number("cast"),
            weight_casts=self.number("cast of a weight"),
        )

    def _bytes(self, kind: str) -> int:
        return sum(n for event, n in self.bytes.items() if event.kind == kind)

    def over(self, budget: Budget) -> str:
        """Say what is above a budget, and which lines asked for it; empty: nothing is."""
        spent, limits = asdict(self.spent()), asdict(budget)
        over = [name for name in limits if spent[name] > limits[name]]
        if not over:
            return ""
        report = [
            f"{name}: {spent[name]}, of {limits[name]} at most\n{self.lines(KINDS[name])}" for name in over
        ]
        row = ", ".join(f"{field.name}={spent[field.name]}" for field in fields(Budget))
        return "\n".join([*report, f"measured: Budget({row})"])


# ------------------------------------------------------------------------------- the line that asked


class Backward:
    """Lines of backward passes. A pass runs under the line that began it, which says little.

    A node of the graph is named after the line that made it in the forward pass. Both know the node's number.

    Attributes:
        code: of the function that runs a graph, where the search for a line ends; None: no graph runs.
        line: of the node that runs.
    """

    code: CodeType | None = None
    line = ""
    _lines: ClassVar[dict[tuple[int, int], str]] = {}  # by thread and number

    @classmethod
    def note_forward(cls) -> None:
        """Note the line of the node that was made last, if it is new."""
        key = threading.get_ident(), torch.autograd._get_sequence_nr() - 1
        if key not in cls._lines:
            cls._lines[key] = where()

    @classmethod
    def enter(cls, node: Any) -> None:
        """Begin to run a node."""
        made_at = cls._lines.get((threading.get_ident(), node._sequence_nr()), "")
        cls.line = f"backward of {made_at or node.name()}"

    @classmethod
    def end(cls) -> None:
        cls.code = None
        cls._lines.clear()


def where() -> str:
    """Return the innermost line of ours on the stack, with that of a library which it called.

    In a backward pass it is that of the node, unless the node's own code is ours.
    """
    frame, library = sys._getframe(1), ""
    while frame is not None:
        if frame.f_code is Backward.code:
            return f"{library}, in {Backward.line}" if library else Backward.line
        rank, file = _place(frame.f_code.co_filename)
        if rank == 1:
            line = f"{file}:{frame.f_lineno}"
            return f"{line} ({library})" if library else line
        if rank == 2 and not library:
            library = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "?"


@functools.cache
def _place(filename: str) -> tuple[int, str]:
    """Return 1 for a file of ours, 2 for one of a library that is shown, else 0; and its name to show."""
    path = Path(filename)
    if path.is_relative_to(TESTS):
        inside = path.relative_to(TESTS)
        return (0, "") if inside.parts[0] == "support" else (1, str(inside))
    for parts, rank in ((OUR_FOLDERS, 1), (LIBRARIES, 2)):
        at = [i for i, part in enumerate(path.parts) if part in parts]
        if at and (rank == 2 or "site-packages" not in path.parts):
            return rank, "/".join(path.parts[at[-1] :])
    return 0, ""
