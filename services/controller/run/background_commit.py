"""Commits the last checkpoint of a run behind its next steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from rolemesh.errors import RolemeshError
from rolemesh.telemetry.metrics import CHECKPOINT_WRITTEN


class BackgroundCommit:
    """The commit of the checkpoint that was begun last; at first there is none."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def begin(self, writing: AsyncExitStack) -> None:
        """Commit a checkpoint, whose writing ends when this stack is closed. The one before is committed."""
        self._task = asyncio.create_task(self._commit(writing))

    async def done(self) -> None:
        """Wait until the checkpoint is committed. Raises what kept it from being written."""
        if self._task:
            await self._task

    async def check(self) -> None:
        """Raise what kept the checkpoint from being written, without waiting for one that still is."""
        if self._task and self._task.done():
            await self._task

    @asynccontextmanager
    async def at_end(self) -> AsyncIterator[None]:
        """Commit the last checkpoint at the end, even if a step failed, but not if the run is cancelled."""
        try:
            try:
                yield
            except Exception:
                with suppress(RolemeshError):  # the step's error came first
                    await self.done()
                raise
            await self.done()
        finally:
            if self._task:
                self._task.cancel()
                await asyncio.wait({self._task})

    async def _commit(self, writing: AsyncExitStack) -> None:
        await writing.aclose()
        CHECKPOINT_WRITTEN.set_to_current_time()
