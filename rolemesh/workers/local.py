"""One rank, in process: a worker's methods run one after another on a thread of the worker's own, so that
the event loop stays free to receive, to send and to answer health checks while a model computes. Where roles
share a device, a method waits for its role's turn before it begins. Calls that wait for the same method are
computed together, where its result has a row for each of theirs."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from rolemesh import threads
from rolemesh.dataproto import DataProto
from rolemesh.door import Door
from rolemesh.telemetry import context as origin
from rolemesh.telemetry import timeline
from rolemesh.workers.lease import Lease
from rolemesh.workers.parking import Parking
from rolemesh.workers.traces import Traces

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_traced: ContextVar[str] = ContextVar("traced", default="")  # the method for which a function is run


class ComputingThread(ThreadPoolExecutor):
    """One thread, which has as many OpenMP threads as the one that makes it.

    A role should be loaded on the thread on which it computes. Every thread that uses OpenMP has a team, and
    once teams together have more threads than there are cores, theirs no longer wait at a barrier but sleep
    there: each operation then begins later (docs/profiling.md).
    """

    def __init__(self, name: str) -> None:
        super().__init__(1, name, _use_threads, (torch.get_num_threads(),))

    @property
    def is_waited_for(self) -> bool:
        """True if another job, or the shutdown, is queued on this thread. A long job may yield to it."""
        return not self._work_queue.empty()


def _use_threads(number: int) -> None:
    torch.get_num_threads()  # else the thread's first large operation takes the number of the process
    torch.set_num_threads(number)


class LocalWorker:
    """Base of every worker: one thread that computes.

    Attributes:
        role: its name.
        parking: of its device tensors; None if it holds none or parks them itself.
        lease: of the device that it shares; None: the device is its own.
        door: lets in what comes over an rpc; rolemesh/rpc/serving/guard.py asks it, the worker does not.
        traces: of its operations; None: no step is traced.
        thread: where it computes.
    """

    door: Door

    def __init__(self, role: str) -> None:
        self.role = role
        self.parking: Parking | None = None
        self.lease: Lease | None = None
        self.traces: Traces | None = None
        self.thread = ComputingThread(role)
        self._lines: dict[str, list[_Waiting]] = {}  # by method; changed by the event loop alone

    def turn(self) -> AbstractAsyncContextManager[None]:
        """While it is entered, the role is on the device; not to be entered from within itself."""
        return nullcontext() if self.lease is None else self.lease.turn(self.role)

    def call(self, method: str, batch: object = None) -> AbstractContextManager[timeline.Call]:
        """A call of a method, for who writes down when it waited and when it computed."""
        resident = self.lease.resident if self.lease else None
        return timeline.recorded(self.role, f"{self.role}.{method}", batch, waits_for=resident or self.role)

    @asynccontextmanager
    async def traced(self, method: str, call: timeline.Call | None = None) -> AsyncIterator[None]:
        """While it is entered, what runs on the worker's thread is traced, in the steps in which the job asks
        for it. Within a turn and not around one: roles of a process are traced one at a time. What has begun
        is ended, whenever the caller is cancelled; what that takes is a part of the call, if it is given."""
        step = origin.step.get()
        if self.traces is None or step not in self.traces.steps:
            yield
            return
        _traced.set(method)
        try:
            await asyncio.shield(self._on_thread(self.traces.begin))
            yield
        finally:  # after `begin`, which the thread has come to first
            with call.during(timeline.WRITES_TRACE) if call else nullcontext():
                await asyncio.shield(self._on_thread(self.traces.end, step))

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function on the worker's thread, in the caller's context (job, step), turn or not. When the
        caller is cancelled the function still ends, before anything else runs on the thread: `sleep` too."""
        if self.traces and (method := _traced.get()):
            function = self.traces.labelled(method, function)
        return await self._on_thread(function, *args, **kwargs)

    async def _on_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await threads.run_on(self.thread, function, *args, **kwargs)

    async def sleep(self) -> int:
        """Leaves the device to another role. Returns bytes moved."""
        assert self.parking is not None, f"{self.role} shares a device and cannot leave it"
        return await self.run(self.parking.park)

    async def wake(self) -> int:
        """Takes the device again. Returns bytes moved."""
        assert self.parking is not None
        return await self.run(self.parking.unpark)

    async def watch(self) -> None:
        """Never returns.

        Raises:
            RoleUnavailable: the worker cannot go on, but in a new process.
        """
        await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Lets the running method end and takes no other."""
        self.thread.shutdown(wait=True, cancel_futures=True)


W = TypeVar("W", bound=LocalWorker)


def on_worker_thread(
    method: Callable[Concatenate[W, P], R],
) -> Callable[Concatenate[W, P], Coroutine[Any, Any, R]]:
    """Makes an ordinary method of a worker an async one that waits for the role's turn and runs on the worker's
    thread. The ordinary one stays at hand as `method.__wrapped__`."""

    async def asynchronous(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        batch = args[0] if args else None
        with self.call(method.__name__, batch) as call:
            async with self.turn(), self.traced(method.__name__, call):
                return await self.run(call.computed(method), self, *args, **kwargs)

    functools.update_wrapper(asynchronous, method)
    return asynchronous


@dataclass(eq=False)
class _Waiting:
    """A call of a method that answers row by row, until its caller has the answer."""

    batch: DataProto
    answer: DataProto | None = None
    is_alone: bool = False  # as it failed together with others


def by_rows(
    method: Callable[[W, DataProto], DataProto],
) -> Callable[[W, DataProto], Coroutine[Any, Any, DataProto]]:
    """As on_worker_thread, for a method whose answer has a row for each row of its batch, which does not depend
    on the rows beside it. When a call begins, those that have come by then are computed with it: a role that
    had to wait for its device, or is behind, so reads equal beginnings once, in full micro-batches. A call is
    computed between its coming and its answer, by no other order. Calls that fail together are computed one by
    one: nobody gets another's error."""

    def answer(self: W, mine: _Waiting, line: Sequence[_Waiting]) -> DataProto:
        together = [each for each in tuple(line) if each.answer is None and not each.is_alone]
        if mine in together and len(together) > 1:
            try:
                answers = method(self, DataProto.concat([each.batch for each in together]))
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                log.warning("%s: %d calls are computed one by one: %s", self.role, len(together), why)
                for each in together:
                    each.is_alone = True
            else:
                ends = list(accumulate(len(each.batch) for each in together))
                assert ends[-1] == len(answers), f"{method.__name__}: {len(answers)} rows answer {ends[-1]}"
                for each, end in zip(together, ends, strict=True):
                    each.answer = answers[end - len(each.batch) : end]
        return method(self, mine.batch) if mine.answer is None else mine.answer

    async def asynchronous(self: W, batch: DataProto, /) -> DataProto:
        line, mine = self._lines.setdefault(method.__name__, []), _Waiting(batch)
        line.append(mine)
        try:
            with self.call(method.__name__, batch) as call:
                async with self.turn(), self.traced(method.__name__, call):
                    return await self.run(call.computed(answer), self, mine, line)
        finally:
            line.remove(mine)

    functools.update_wrapper(asynchronous, method)
    return asynchronous


def as_call(
    method: Callable[Concatenate[W, P], Awaitable[R]],
) -> Callable[Concatenate[W, P], Coroutine[Any, Any, R]]:
    """Makes an async method of a worker one whose calls can be written down (LocalWorker.call)."""

    @functools.wraps(method)
    async def written(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.call(method.__name__, args[0] if args else None) as call, call.computing():
            return await method(self, *args, **kwargs)

    return written
