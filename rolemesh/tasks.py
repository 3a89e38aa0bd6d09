"""Tasks that run side by side, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

R = TypeVar("R")


async def gather(*calls: Coroutine[Any, Any, R]) -> list[R]:
    """The results of calls that run at the same time. If one fails the others are cancelled, and its error
    is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Returns when none of them runs any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def closed_at_end(stream: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Close a stream however its reader leaves, so that the far end stops working for it."""
    try:
        yield
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
