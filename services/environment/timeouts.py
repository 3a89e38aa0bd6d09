"""Runs the code of environments with a time limit, and on threads if it blocks."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from rolemesh.telemetry import metrics

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

MAX_THREADS = 256  # functions that run at the same time, without those that nobody waits for any more


class TookTooLong(Exception):
    """The code did not end in time. It was cancelled, but may continue."""


async def within(seconds: float, work: Awaitable[R]) -> R:
    """Await the code of a user, and return its result.

    Args:
        seconds: time limit.
        work: the code.

    Raises:
        TookTooLong: it did not end in time.
        RuntimeError: it called sys.exit, which would end the process, or cancelled itself.
        Exception: what it raises.
    """
    task = asyncio.ensure_future(without_exit(work))
    task.add_done_callback(look_at)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise TookTooLong(f"it took longer than {seconds:g} s")
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()
    finally:
        task.cancel()  # without waiting for its end, because it may resist


async def without_exit(work: Awaitable[R]) -> R:
    """Await the code of a user. Raises RuntimeError if the code would end the process."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r:.50})") from error
    except KeyboardInterrupt as error:
        raise RuntimeError("it raised KeyboardInterrupt") from error


def look_at(task: asyncio.Future[Any]) -> None:
    """Mark a task's error as retrieved, since its reader may come later or never."""
    if not task.cancelled():
        task.exception()


class Threads:
    """Runs functions, each on a thread of its own. A thread that hangs ends only with the process.

    Args:
        most: functions that run at the same time; further ones wait. Functions whose callers are gone do not
            count.
    """

    def __init__(self, most: int = MAX_THREADS) -> None:
        self._free = asyncio.Semaphore(most)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a function in the caller's context. If the caller is cancelled, the thread goes on without it."""
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        done: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            result = None
            error = None
            try:
                result = context.run(function, *args, **kwargs)
            except BaseException as raised:
                # A future cannot raise a StopIteration, and a SystemExit would end the event loop.
                ordinary = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                error = raised if ordinary else RuntimeError(f"{type(raised).__name__}: {raised}")
            with suppress(RuntimeError):  # raised where the event loop has ended
                loop.call_soon_threadsafe(end, result, error)

        def end(result: Any, error: Any) -> None:
            if done.cancelled():
                metrics.TOOL_THREADS_LEFT.dec()
            elif error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        async with self._free:
            thread = threading.Thread(target=work, daemon=True, name=f"tool {function!r:.50}")
            thread.start()
            try:
                return await done  # type: ignore[no-any-return]
            except asyncio.CancelledError:
                if done.cancelled():
                    metrics.TOOL_THREADS_LEFT.inc()
                    log.warning("nobody waits any more for a function that still runs: %s", thread.name)
                raise
