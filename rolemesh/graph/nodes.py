"""Marks the controller's own functions as nodes of the step graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ControllerNode:
    """A function of the controller that works on the batch.

    Args:
        name: the function's name.
        phase: the key of `timing_s/` to which its time is added; empty for none.
        reads: returns the columns that it reads in a job.
        writes: returns the columns that it adds in a job.
    """

    name: str
    phase: str
    reads: Callable[[JobConfig], tuple[str, ...]]
    writes: Callable[[JobConfig], tuple[str, ...]]


class Observer(Protocol):
    """Observes the functions of the controller. The recorder and the loop's stopwatch implement it."""

    def during(self, node: ControllerNode, batch: DataProto) -> AbstractContextManager[None]:
        """Return the context in which the function runs."""
        ...


observer: ContextVar[Observer | None] = ContextVar("observer", default=None)
CONTROLLER_NODES: dict[str, ControllerNode] = {}
Columns = tuple[str, ...] | Callable[[JobConfig], tuple[str, ...]]


def node(
    reads: Columns, writes: Columns, phase: str = ""
) -> Callable[[Callable[Concatenate[DataProto, P], R]], Callable[Concatenate[DataProto, P], R]]:
    """Mark a function of the controller as a node of the step graph. Its first argument must be the batch.

    Args:
        reads: the columns that it reads, or a function from the job to these.
        writes: the columns that it adds, or a function from the job to these.
        phase: as in ControllerNode.
    """

    def decorate(function: Callable[Concatenate[DataProto, P], R]) -> Callable[Concatenate[DataProto, P], R]:
        this = ControllerNode(function.__name__, phase, _of_job(reads), _of_job(writes))
        CONTROLLER_NODES[this.name] = this

        @functools.wraps(function)
        def observed(batch: DataProto, /, *args: P.args, **kwargs: P.kwargs) -> R:
            watching = observer.get()
            with watching.during(this, batch) if watching else nullcontext():
                return function(batch, *args, **kwargs)

        return observed

    return decorate


def _of_job(columns: Columns) -> Callable[[JobConfig], tuple[str, ...]]:
    return columns if callable(columns) else lambda job: columns
