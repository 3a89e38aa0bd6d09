"""Runs tasks concurrently, and ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

R = TypeVar("R")


async def gather(*calls: Coroutine[Any, Any, R]) -> list[R]:
    """Run calls concurrently and return their results. If one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and return once all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def as_they_end(tasks: Sequence[asyncio.Task[R]]) -> AsyncGenerator[list[asyncio.Task[R]]]:
    """Yield tasks as they end, each time all that have ended since the last time.

    Closing the iterator cancels the other tasks, and waits until all have ended.
    """
    ended: asyncio.Queue[asyncio.Task[R]] = asyncio.Queue()
    for task in tasks:
        task.add_done_callback(ended.put_nowait)
    try:
        left = len(tasks)
        while left:
            done = [await ended.get()]
            while not ended.empty():
                done.append(ended.get_nowait())
            left -= len(done)
            yield done
    finally:
        await cancel_all(tasks)


@asynccontextmanager
async def closed_at_end(stream: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Close a stream when its reader leaves the block for any reason, so that the other side stops working."""
    try:
        yield
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
