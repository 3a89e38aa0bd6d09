"""Work on threads for a call that may be cancelled: a thread goes on without its caller, and keeps its work."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Is told of all work that a call gives to a thread. The server counts the call's memory until it is done.
watch: ContextVar[Callable[[asyncio.Future[Any]], None] | None] = ContextVar("watch", default=None)


async def run_on(
    executor: Executor | None, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Runs a function on a thread, in the caller's context. When the caller is cancelled, a function that runs
    goes on, and one that is queued is skipped when its turn comes. Only then is it done for `watch`.

    Args:
        executor: None: the event loop's own.
    """
    context, is_wanted = contextvars.copy_context(), True

    def work() -> Any:
        return context.run(function, *args, **kwargs) if is_wanted else None

    done: asyncio.Future[R] = asyncio.get_running_loop().run_in_executor(executor, work)
    if (told := watch.get()) is not None:
        told(done)
    try:
        # A cancelled future would be done at once, while the executor's queue or a thread still holds the work.
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        is_wanted = False
        raise
