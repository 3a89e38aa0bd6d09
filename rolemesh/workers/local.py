"""A worker in this process: its methods run one after another on the worker's own thread.

The event loop stays free to receive, send and answer health checks while a model computes. If roles share a
device, a method waits for its role's turn before it starts. Calls that wait for the same method are batched, if
the method answers row by row.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, TypeVar

from rolemesh import threads
from rolemesh.batch_validation import BatchValidator
from rolemesh.dataproto import DataProto
from rolemesh.ranks.rank_load import RankLoads
from rolemesh.telemetry import context as origin
from rolemesh.telemetry import timeline
from rolemesh.workers.broken_device import error_of_device
from rolemesh.workers.commands import on_all_ranks
from rolemesh.workers.offloading import Offloader
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_traced: ContextVar[str] = ContextVar("traced", default="")  # the method for which a function runs


class LocalWorker:
    """Base of every worker: one thread that computes.

    Args:
        role: its name.
        worker_context: its thread, device lease and traces; None: own thread and device, without traces.

    Attributes:
        offloader: moves its device tensors away; None if it holds no device tensors or moves them itself.
        on_demand: moves other tensors away with them. These come back only when a method uses them.
        loads: the work that each of the role's ranks did.
        validator: checks the batches of an rpc; rolemesh/rpc/serving/guard.py calls it, the worker does not.
    """

    validator: BatchValidator

    def __init__(self, role: str, worker_context: WorkerContext | None = None) -> None:
        self.role = role
        self.worker_context = worker_context or WorkerContext(ComputingThread(role))
        self.offloader: Offloader | None = None
        self.on_demand: Offloader | None = None
        self.loads = RankLoads(role)
        self._lines: dict[str, list[_Waiting]] = {}  # by method; changed by the event loop alone

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Keep the role on the device within the context. The context must not be nested."""
        lease = self.worker_context.lease
        return nullcontext() if lease is None else lease.turn(self.role)

    def call(self, method: str, batch: object = None) -> AbstractContextManager[timeline.TimedCall]:
        """Record a call of a method for the step's timeline: when it waited and when it computed."""
        lease = self.worker_context.lease
        resident = lease.resident if lease else None
        return timeline.recorded(self.role, f"{self.role}.{method}", batch, waits_for=resident or self.role)

    @asynccontextmanager
    async def traced(self, method: str, call: timeline.TimedCall | None = None) -> AsyncIterator[None]:
        """Trace the worker's thread within the context, if the job profiles this step.

        Enter it inside a turn, not around one: roles of a process are traced one at a time. A trace that has
        begun is always ended, even if the caller is cancelled. The time to end it is recorded in `call`, if
        given.
        """
        step = origin.step.get()
        traces = self.worker_context.traces
        if traces is None or step not in traces.steps:
            yield
            return
        _traced.set(method)
        try:
            await asyncio.shield(self._on_thread(self.begin_trace, self._parts()))
            yield
        finally:  # runs after `begin_trace`, which was queued on the thread first
            with call.during(timeline.WRITES_TRACE) if call else nullcontext():
                await asyncio.shield(self._on_thread(self.end_trace, self._parts(step=step)))

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function on the worker's thread, in the caller's context (job, step). It waits for no turn.

        If the caller is cancelled, the function still runs to its end before anything else on the thread,
        `sleep` included.
        """
        if self.worker_context.traces and (method := _traced.get()):
            function = self.worker_context.traces.labelled(method, function)
        return await self._on_thread(function, *args, **kwargs)

    async def _on_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await threads.run_on(self.worker_context.thread, function, *args, **kwargs)

    async def sleep(self) -> int:
        """Leave the device to another role. Return the bytes copied, of all ranks."""
        return _sum_of_bytes(await self.run(self.offload, self._parts()))

    async def wake(self) -> int:
        """Return to the device. Return the bytes copied, of all ranks."""
        return _sum_of_bytes(await self.run(self.reload, self._parts()))

    def _parts(self, **meta: Any) -> list[DataProto]:
        """Return parts without rows, for a command that needs none."""
        return [DataProto({}, meta_info=dict(meta)) for _ in range(self.worker_context.ranks.size)]

    @on_all_ranks
    def offload(self, part: DataProto) -> DataProto:
        """Move this rank's tensors off its device. meta_info of the answer: `num_bytes`."""
        assert self.offloader is not None, f"{self.role} shares a device and cannot leave it"
        # If the second move fails, the role stays awake: the first tensors come back when they are used.
        num_bytes = self.on_demand.offload() if self.on_demand else 0
        return DataProto({}, meta_info={"num_bytes": num_bytes + self.offloader.offload()})

    @on_all_ranks
    def reload(self, part: DataProto) -> DataProto:
        """Move this rank's tensors back. meta_info of the answer: `num_bytes`."""
        assert self.offloader is not None
        return DataProto({}, meta_info={"num_bytes": self.offloader.reload()})

    @on_all_ranks
    def begin_trace(self, part: DataProto) -> DataProto:
        """Begin to trace this rank's thread."""
        assert self.worker_context.traces is not None
        self.where_it_computes(self.worker_context.traces.begin)
        return DataProto({})

    @on_all_ranks
    def end_trace(self, part: DataProto) -> DataProto:
        """End that, and write the trace of the step in meta_info."""
        assert self.worker_context.traces is not None
        self.where_it_computes(functools.partial(self.worker_context.traces.end, part.meta_info["step"]))
        return DataProto({})

    def where_it_computes(self, function: Callable[[], None]) -> None:
        """Run a function on the thread on which the role's model computes: this one."""
        function()

    def silent_s(self) -> float:
        """Return for how many seconds the running computation has made no progress; 0 if there is none.

        Progress is a micro-batch, or a token of each row of engine hf.
        """
        return self.worker_context.thread.silent_s

    async def watch(self) -> None:
        """Wait until the worker fails unrecoverably, then raise; never return.

        Raises:
            RoleUnavailable: the worker failed, and only a new process can replace it.
        """
        await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Wait for the running method to end, and cancel those that are queued."""
        self.worker_context.thread.shutdown(wait=True, cancel_futures=True)


def _sum_of_bytes(answers: Sequence[DataProto]) -> int:
    return sum(answer.meta_info["num_bytes"] for answer in answers)


W = TypeVar("W", bound=LocalWorker)


def on_worker_thread(
    method: Callable[Concatenate[W, P], R],
) -> Callable[Concatenate[W, P], Coroutine[Any, Any, R]]:
    """Make a worker's method async: it waits for the role's turn, then runs on the worker's thread.

    The original method is available as `method.__wrapped__`.
    """

    async def asynchronous(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        batch = args[0] if args else None
        with self.call(method.__name__, batch) as call:
            async with self.turn(), self.traced(method.__name__, call):
                return await self.run(call.computed(method), self, *args, **kwargs)

    functools.update_wrapper(asynchronous, method)
    return asynchronous


@dataclass(eq=False)
class _Waiting:
    """A pending call of a method that answers row by row."""

    batch: DataProto
    answer: DataProto | None = None
    is_alone: bool = False  # computed by itself, because it failed in a batch of calls


def by_rows(
    method: Callable[[W, DataProto], DataProto],
) -> Callable[[W, DataProto], Coroutine[Any, Any, DataProto]]:
    """As on_worker_thread, but batch pending calls, for a method whose answer has one row per row of its batch.

    A row of the answer must not depend on the other rows. When a call starts, all calls that wait for the same
    method are computed with it. So a role that waited for its device, or is behind, computes shared prefixes
    once and fills its micro-batches. A call may be computed before calls of other methods that came earlier. If
    a batch of calls fails, each is computed by itself, so no call gets another's error.
    """

    def answer(self: W, mine: _Waiting, line: Sequence[_Waiting]) -> DataProto:
        together = [each for each in tuple(line) if each.answer is None and not each.is_alone]
        if mine in together and len(together) > 1:
            try:
                answers = method(self, DataProto.concat([each.batch for each in together]))
            except Exception as error:
                if error_of_device(error) is not None:
                    raise
                why = f"{type(error).__name__}: {error}"
                log.warning("%s: computing %d calls one by one: %s", self.role, len(together), why)
                for each in together:
                    each.is_alone = True
            else:
                ends = list(accumulate(len(each.batch) for each in together))
                assert ends[-1] == len(answers), f"{method.__name__}: {len(answers)} rows answer {ends[-1]}"
                for each, end in zip(together, ends, strict=True):
                    each.answer = answers[end - len(each.batch) : end]
        return method(self, mine.batch) if mine.answer is None else mine.answer

    async def asynchronous(self: W, batch: DataProto, /) -> DataProto:
        line = self._lines.setdefault(method.__name__, [])
        mine = _Waiting(batch)
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
    """Record the calls of a worker's async method for the step's timeline (LocalWorker.call)."""

    @functools.wraps(method)
    async def written(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.call(method.__name__, args[0] if args else None) as call, call.computing():
            return await method(self, *args, **kwargs)

    return written
