"""Pulls a version from several holders at the same time, each of which has stripes of it (stripes.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from rolemesh.weights.stripes import Stripes
from rolemesh.weights.weight_version import WeightVersion

# Streams the bytes [start, end) of a version from one holder. It yields all of them or raises.
Fetch = Callable[[int, int], AsyncGenerator[memoryview, None]]


class HolderFailed(Exception):
    """Raised if a holder did not send its stripes.

    Args:
        number: of the holder.
        error: of the call.
    """

    def __init__(self, number: int, error: Exception) -> None:
        super().__init__(f"holder {number}: {error}")
        self.number = number
        self.error = error


class DamagedTwice(Exception):
    """A piece did not match its checksum when it was fetched again."""


class StripedPull:
    """A pull of one version. It can be run again after an error, and then fetches only bytes that are missing.

    Every holder's stripes arrive in order, each in its place of the region. So all bytes before the first
    missing byte of any holder have arrived. They are verified in order, as with a single source.

    Args:
        holding: the version, with a region of its own.
        stripes: its division among holders.
    """

    def __init__(self, holding: WeightVersion, stripes: Stripes) -> None:
        self.holding = holding
        self.stripes = stripes
        first = holding.num_verified
        self._next = [stripes.next_of(number, first) for number in range(stripes.num_holders)]
        self._fetched_again: set[int] = set()
        self._is_repairing = False

    @property
    def is_waiting_for(self) -> int:
        """The holder of the first missing byte."""
        return self.stripes.holder_of(min(self._next) if not self._is_repairing else self.holding.num_verified)

    async def run(
        self, fetches: Sequence[Fetch], arrived: Callable[[int], None], verified: Callable[[], None]
    ) -> None:
        """Fetch all bytes that have not arrived.

        Args:
            fetches: of each holder, by number.
            arrived: called when bytes arrive, with their number.
            verified: called when more bytes are verified.

        Raises:
            HolderFailed: a holder did not send what it has. The other streams are cut.
            DamagedTwice: a piece arrived damaged twice.
        """
        self._fetches = fetches
        self._arrived = arrived
        self._verified = verified
        self._fetched_again = set()
        self._is_repairing = False
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for number in range(self.stripes.num_holders):
                    self._tasks.create_task(self._take(number))
                self._verify()  # bytes of an earlier run
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures.exceptions[0].__cause__

    async def _take(self, number: int) -> None:
        """Fetch a holder's stripes, one after another."""
        num_bytes = self.holding.num_bytes
        while (start := self._next[number]) < num_bytes:
            end = min(num_bytes, self.stripes.end_of(start))
            async with aclosing(self._fetch(number, start, end)) as arriving:
                async for at in arriving:
                    self._next[number] = at if at < end else self.stripes.next_of(number, end)
                    self._verify()

    async def _fetch(self, number: int, start: int, end: int) -> AsyncGenerator[int, None]:
        """Write the bytes [start, end) of a holder into the region. Yield the progress after each message."""
        async with aclosing(self._fetches[number](start, end)) as messages:
            while True:
                try:
                    data = await anext(messages)
                except StopAsyncIteration:
                    return
                except Exception as error:
                    raise HolderFailed(number, error) from error
                await self._write(start, data)
                start += data.nbytes
                self._arrived(data.nbytes)
                yield start

    async def _write(self, at: int, data: memoryview) -> None:
        """Write bytes in a thread: new pages take as long as all else, and the streams share one thread."""
        writing = asyncio.ensure_future(asyncio.to_thread(self.holding.region.write, at, data))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})  # nothing is written after the pull has ended
            raise

    def _verify(self) -> None:
        """Verify what has arrived in order. A damaged piece is fetched again, beside the streams."""
        if self._is_repairing:
            return
        holding = self.holding
        arrived = min(*self._next, holding.num_bytes)
        verified = holding.verified_until(arrived)
        if verified > holding.num_verified:
            holding.advance(verified)
            self._verified()
        end = min(verified + holding.manifest.piece_bytes, holding.num_bytes)
        if verified < end <= arrived:
            if verified in self._fetched_again:
                raise DamagedTwice(f"the piece at byte {verified} arrived damaged twice")
            self._fetched_again.add(verified)
            self._is_repairing = True
            self._tasks.create_task(self._repair(verified, end))

    async def _repair(self, start: int, end: int) -> None:
        async for _ in self._fetch(self.stripes.holder_of(start), start, end):
            pass
        self._is_repairing = False
        self._verify()
