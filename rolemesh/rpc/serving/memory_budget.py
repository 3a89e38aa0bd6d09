"""Memory budget of one process for the batches that callers send, shared by all its streams.

A stalled stream must not keep memory from the others. It is ended after a long silence, and already after a
short one if another stream needs its memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc

from rolemesh.errors import RoleBusy, RoleTimeout
from rolemesh.wire.limits import IDLE_S, MEMORY_SHARE, STALL_S

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),  # cgroup v2; holds "max" without a limit
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # cgroup v1; holds about 2^63 without a limit
)


class MemoryBudget:
    """Bounds the memory that all calls of a process hold together. Belongs to one event loop.

    Args:
        total_bytes: budget for regions, as they arrive, and their unpacked tensors; None: 1/MEMORY_SHARE of the
            process's memory.
        stall_s: seconds of silence after which a stream is ended.
        idle_s: seconds of silence after which a stream may be ended to make room for another.
    """

    def __init__(self, total_bytes: int | None = None, *, stall_s: float = STALL_S, idle_s: float = IDLE_S):
        self.total_bytes = memory_bytes() // MEMORY_SHARE if total_bytes is None else total_bytes
        self.stall_s = stall_s
        self.idle_s = idle_s
        self._reservations: set[CallReservation] = set()

    @property
    def held_bytes(self) -> int:
        """Bytes that all calls hold now."""
        return sum(reservation.num_bytes for reservation in self._reservations)

    @contextmanager
    def reserve(self) -> Iterator[CallReservation]:
        """Account for one call. Its memory is freed once the call and all its work in threads have ended."""
        reservation = CallReservation(self)
        self._reservations.add(reservation)
        try:
            yield reservation
        finally:
            reservation.has_ended = True
            self._settle(reservation)

    def _settle(self, reservation: CallReservation) -> None:
        """Stop counting a call that has ended and has no work left in threads."""
        if reservation.has_ended and not reservation.num_working:
            self._reservations.discard(reservation)

    def free(self, num_bytes: int) -> None:
        """Make room for `num_bytes`: end silent streams, the longest silent first, until enough is free.

        If ending all silent streams would not free enough, none is ended.

        Raises:
            RoleBusy: the calls that are not silent hold too much.
        """
        lacking = num_bytes - (self.total_bytes - self.held_bytes)
        idle = [
            reservation
            for reservation in self._reservations
            if reservation.num_bytes and reservation.silent_s >= self.idle_s
        ]
        if lacking > sum(reservation.num_bytes for reservation in idle):
            raise RoleBusy(
                f"no room for {num_bytes} bytes more: {len(self._reservations)} calls hold {self.held_bytes} "
                f"of the {self.total_bytes} bytes that this process has for batches"
            )
        idle.sort(key=lambda reservation: reservation.silent_s)
        while lacking > 0:
            lacking -= idle[-1].num_bytes
            idle.pop().end()


class CallReservation:
    """One call's share of a memory budget.

    Attributes:
        num_bytes: memory that the call holds.
        num_working: unfinished work that the call started in threads. It may outlive the call.
        has_ended: True once the call itself has ended.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.num_bytes = 0
        self.num_working = 0
        self.has_ended = False
        self._since = 0.0
        self._waiting: asyncio.Timeout | None = None  # set while waiting for a frame
        self._is_evicted = False

    @property
    def silent_s(self) -> float:
        """Seconds spent waiting for the current frame; negative if the call is not waiting for one."""
        return asyncio.get_running_loop().time() - self._since if self._waiting else -1.0

    async def frames(self, frames: Any) -> AsyncIterator[bytes]:
        """Yield the frames of the call's request.

        Raises:
            RoleTimeout: the next frame did not arrive within stall_s.
            RoleBusy: the stream was evicted while silent, because another one needed its memory.
        """
        async with aclosing(aiter(frames)) as messages:  # an open iterator would keep the last frame
            while (frame := await self._next(messages)) is not None:
                yield frame
                del frame

    async def _next(self, messages: Any) -> bytes | None:
        self._since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.budget.stall_s) as self._waiting:
                frame: bytes | None = await anext(messages, None)
        except TimeoutError:
            if not self._is_evicted:
                raise RoleTimeout(f"the stream was silent for {self.budget.stall_s:g} s") from None
        finally:
            self._waiting = None
        if self._is_evicted:
            raise RoleBusy("the stream was silent, and another one needed its memory")
        return frame

    async def drop_rest(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Read and discard the rest of a refused request, until it ends, is silent for idle_s, or stall_s pass.

        If a call ends while its caller writes, grpc.aio often reports a failed write instead of the reason.

        Args:
            read: returns the next frame, or EOF.
        """
        self.num_bytes = 0
        if self._is_evicted:  # evicted for being silent: nothing is being written
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self.budget.stall_s):
                while True:
                    async with asyncio.timeout(self.budget.idle_s):
                        if await read() is grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
                            return

    def watch(self, work: asyncio.Future[Any]) -> None:
        """Count the call's memory until `work` is done, even if the call is cancelled before."""

        def ended(_: object) -> None:
            self.num_working -= 1
            self.budget._settle(self)

        self.num_working += 1
        work.add_done_callback(ended)

    def end(self) -> None:
        """End the stream while it waits for a frame. Its memory is released when the event loop resumes it."""
        assert self._waiting is not None
        self._is_evicted = True
        self.num_bytes = 0
        self._waiting.reschedule(0.0)  # in the past

    def resize(self, num_bytes: int) -> None:
        """Set the bytes that the call holds.

        Raises:
            RoleBusy: the budget has no room for them.
        """
        if num_bytes > self.num_bytes:
            self.budget.free(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes


def memory_bytes() -> int:
    """Return the memory available to this process: the machine's, or the container's limit if lower."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with suppress(OSError):
            limit = path.read_text().strip()
            most = min(most, int(limit)) if limit.isdecimal() else most
    return most
