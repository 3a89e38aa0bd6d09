"""Replicas that a test adds and removes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from rolemesh.rpc.calling.pool import ReplicaPool


class Listed:
    """Implements rolemesh.rpc.calling.discovery.Members."""

    def __init__(self, *addresses: str) -> None:
        self._now, self._changed = frozenset(addresses), asyncio.Event()

    def tell(self, *addresses: str) -> None:
        """Set the replicas that exist from now on."""
        self._now = frozenset(addresses)
        self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while True:
            self._changed.clear()
            yield self._now
            await self._changed.wait()


async def until(pool: ReplicaPool, holds: Callable[[], object]) -> None:
    """Wait until the condition holds; it is checked after each change of the pool."""
    async with asyncio.timeout(120), pool._changed:
        await pool._changed.wait_for(holds)
