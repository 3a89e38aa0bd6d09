"""Memory of one process for the batches that callers send, shared by all of its streams.

A stream that has come to a halt must not keep memory from the others: it is ended when it has been silent for
too long, and at once when another stream needs what it holds.
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
    Path("/sys/fs/cgroup/memory.max"),  # version 2; without a limit: max
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),  # version 1; without a limit: about 2^63
)


class Room:
    """Bounds what all calls of a process hold together. Belongs to one event loop.

    Args:
        total_bytes: of regions as they arrive, and of what they are unpacked to.
        stall_s: seconds after which a stream that sends nothing is ended.
        idle_s: seconds after which it is ended where another stream has no room.
    """

    def __init__(self, total_bytes: int | None = None, *, stall_s: float = STALL_S, idle_s: float = IDLE_S):
        self.total_bytes = memory_bytes() // MEMORY_SHARE if total_bytes is None else total_bytes
        self.stall_s, self.idle_s = stall_s, idle_s
        self._stays: set[Stay] = set()

    @property
    def held_bytes(self) -> int:
        """What all calls hold now."""
        return sum(stay.num_bytes for stay in self._stays)

    @contextmanager
    def stay(self) -> Iterator[Stay]:
        """For one call. Its memory is free when the call and all work that it gave to threads have ended."""
        stay = Stay(self)
        self._stays.add(stay)
        try:
            yield stay
        finally:
            stay.has_left = True
            self._settle(stay)

    def _settle(self, stay: Stay) -> None:
        """Forgets a call that holds nothing any more."""
        if stay.has_left and not stay.num_working:
            self._stays.discard(stay)

    def make(self, num_bytes: int) -> None:
        """Ends silent streams, the longest silent first, until so many bytes are free. Where that would not do,
        none is ended.

        Raises:
            RoleBusy: the calls that are not silent hold too much.
        """
        lacking = num_bytes - (self.total_bytes - self.held_bytes)
        idle = [stay for stay in self._stays if stay.num_bytes and stay.silent_s >= self.idle_s]
        if lacking > sum(stay.num_bytes for stay in idle):
            raise RoleBusy(
                f"no room for {num_bytes} bytes more: {len(self._stays)} calls hold {self.held_bytes} of the "
                f"{self.total_bytes} bytes that this process has for batches"
            )
        idle.sort(key=lambda stay: stay.silent_s)
        while lacking > 0:
            lacking -= idle[-1].num_bytes
            idle.pop().end()


class Stay:
    """What one call holds of a room.

    Attributes:
        num_bytes: how much that is.
        num_working: pieces of work that the call gave to threads and that are not done. They may outlive it.
        has_left: the call itself has ended.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.num_bytes = 0
        self.num_working = 0
        self.has_left = False
        self._since = 0.0
        self._waiting: asyncio.Timeout | None = None  # while a frame is waited for
        self._ended = False

    @property
    def silent_s(self) -> float:
        """Seconds for which a frame has been waited for; below 0: none is."""
        return asyncio.get_running_loop().time() - self._since if self._waiting else -1.0

    async def frames(self, frames: Any) -> AsyncIterator[bytes]:
        """The frames of the call's request.

        Raises:
            RoleTimeout: the next one did not come within stall_s.
            RoleBusy: it was waited for, and another stream took this one's room.
        """
        async with aclosing(aiter(frames)) as messages:  # left open it would hold the last frame
            while (frame := await self._next(messages)) is not None:
                yield frame
                del frame

    async def _next(self, messages: Any) -> bytes | None:
        self._since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.room.stall_s) as self._waiting:
                frame: bytes | None = await anext(messages, None)
        except TimeoutError:
            if not self._ended:
                raise RoleTimeout(f"the stream was silent for {self.room.stall_s:g} s") from None
        finally:
            self._waiting = None
        if self._ended:
            raise RoleBusy("the stream was silent, and another one needed its room")
        return frame

    async def drop_rest(self, read: Callable[[], Awaitable[Any]]) -> None:
        """Reads what still comes of a request that is refused, and keeps none of it, to its end or a silence.

        A caller whose call ends while it writes is often not told why: grpc.aio says that it could not write.

        Args:
            read: the next frame, or EOF.
        """
        self.num_bytes = 0
        if self._ended:  # it was silent
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self.room.stall_s):
                while True:
                    async with asyncio.timeout(self.room.idle_s):
                        if await read() is grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
                            return

    def watch(self, work: asyncio.Future[Any]) -> None:
        """Counts what the call holds until this is done, though the call may be cancelled before."""

        def ended(_: object) -> None:
            self.num_working -= 1
            self.room._settle(self)

        self.num_working += 1
        work.add_done_callback(ended)

    def end(self) -> None:
        """Ends the stream while it waits for a frame. Its memory goes as soon as the event loop has told it."""
        assert self._waiting is not None
        self._ended, self.num_bytes = True, 0
        self._waiting.reschedule(0.0)  # in the past

    def resize(self, num_bytes: int) -> None:
        """From now on the call holds so many bytes.

        Raises:
            RoleBusy: there is no room for them.
        """
        if num_bytes > self.num_bytes:
            self.room.make(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes


def memory_bytes() -> int:
    """What this process may have: the machine's memory, or its container's limit where that is lower."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_LIMITS:
        with suppress(OSError):
            limit = path.read_text().strip()
            most = min(most, int(limit)) if limit.isdecimal() else most
    return most
