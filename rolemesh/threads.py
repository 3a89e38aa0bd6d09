"""Runs work in threads for calls that may be cancelled. The thread continues without its caller."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Called with the future of each function that a call runs in a thread. The server counts the call's memory
# until all of them are done.
watch: ContextVar[Callable[[asyncio.Future[Any]], None] | None] = ContextVar("watch", default=None)


class _Progress(threading.local):
    """A callback for a thread's progress."""

    note: Callable[[], None] | None = None


_progress = _Progress()


def note_progress_with(note: Callable[[], None] | None) -> None:
    """Let `progress` call this function on this thread; None: no function."""
    _progress.note = note


def progress() -> None:
    """Note that this thread makes progress in a long piece of work: another micro-batch, another token."""
    if _progress.note is not None:
        _progress.note()


async def run_on(
    executor: Executor | None, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Run a function in a thread, in the caller's context.

    If the caller is cancelled, a running function continues, and a queued one is skipped when its turn comes.
    Only then does `watch` see the work as done.

    Args:
        executor: where to run it; None: the event loop's default executor.
        function: the function.
        args: its arguments.
        kwargs: its keyword arguments.

    Returns:
        The function's result; its errors are raised.
    """
    context = contextvars.copy_context()
    is_wanted = True

    def work() -> Any:
        return context.run(function, *args, **kwargs) if is_wanted else None

    done: asyncio.Future[R] = asyncio.get_running_loop().run_in_executor(executor, work)
    if (watcher := watch.get()) is not None:
        watcher(done)
    try:
        # Without the shield, cancelling would mark the future done while a thread or the queue still holds the
        # work.
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        is_wanted = False
        raise
