"""Deadlines of one client's calls. The time that a call waits for earlier calls does not count.

A replica may answer one call after another. If the wait counted, a call that is sent early would fail although
its replica works.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Deadline:
    """The time by which a call must be answered: `timeout_s` after its time began. Only `Deadlines` moves it.

    Args:
        timeout_s: seconds.
        waits: True if the call waits for earlier ones, so that its time has not begun.

    Attributes:
        has_passed: True once `limit` has ended a block at the deadline.
    """

    def __init__(self, timeout_s: float, *, waits: bool = False) -> None:
        self.timeout_s = timeout_s
        self.has_passed = False
        self._waits = waits
        self._since = asyncio.get_running_loop().time()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._since + self.timeout_s - asyncio.get_running_loop().time()

    def put_off(self) -> None:
        """Count `timeout_s` from now, if the call's time has not begun."""
        if self._waits:
            self._since = asyncio.get_running_loop().time()

    def begin(self) -> None:
        """Begin the call's time, if it has not begun: from now on the deadline is fixed."""
        self.put_off()
        self._waits = False

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End the block with TimeoutError at the deadline, which may move meanwhile."""
        loop = asyncio.get_running_loop()
        alarm: asyncio.Handle

        def look() -> None:
            nonlocal alarm
            if self.left_s > 0:
                alarm = loop.call_later(self.left_s, look)
            else:
                self.has_passed = True
                timeout.reschedule(loop.time())

        async with asyncio.timeout(None) as timeout:
            alarm = loop.call_soon(look)
            try:
                yield
            finally:
                alarm.cancel()


class Deadlines:
    """The deadlines of a client's running calls, in the order in which the calls began.

    A call's time begins when all earlier calls have ended, or when its own first rows are answered. Until then
    every answer to an earlier call puts its deadline off. Every call ends, because the earliest one has a fixed
    deadline.

    Args:
        timeout_s: seconds, of each call.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._running: list[Deadline] = []

    @contextmanager
    def opened(self) -> Iterator[Deadline]:
        """Count a call as running within the context."""
        deadline = Deadline(self._timeout_s, waits=bool(self._running))
        self._running.append(deadline)
        try:
            yield deadline
        finally:
            self.answered(deadline)  # its end puts off later deadlines, as an answer does
            self._running.remove(deadline)
            if self._running:
                self._running[0].begin()

    def answered(self, deadline: Deadline) -> None:
        """Note that rows of a call were answered."""
        deadline.begin()
        for later in self._running[self._running.index(deadline) + 1 :]:
            later.put_off()
