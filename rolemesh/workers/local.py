"""One rank, in process: a worker's methods run one after another on a thread of the worker's own, so that
the event loop stays free to receive, to send and to answer health checks while a model computes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LocalWorker:
    """What every worker is: something with one thread that computes."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function on the worker's thread, in the caller's context (job, step)."""
        context = contextvars.copy_context()
        call = functools.partial(context.run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """Lets the running method end and takes no other."""
        self._thread.shutdown(wait=True, cancel_futures=True)


W = TypeVar("W", bound=LocalWorker)


def on_worker_thread(
    method: Callable[Concatenate[W, P], R],
) -> Callable[Concatenate[W, P], Coroutine[Any, Any, R]]:
    """Makes an ordinary method of a worker an async one that runs on the worker's thread. The ordinary one
    stays at hand as `method.__wrapped__`."""

    async def asynchronous(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.run(method, self, *args, **kwargs)

    functools.update_wrapper(asynchronous, method)
    return asynchronous
