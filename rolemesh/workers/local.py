"""One rank, in process: a worker's methods run one after another on a thread of the worker's own, so that
the event loop stays free to receive, to send and to answer health checks while a model computes. Where roles
share a device, a method waits for its role's turn before it begins."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

from rolemesh.workers.lease import Lease
from rolemesh.workers.parking import Parking

P = ParamSpec("P")
R = TypeVar("R")


class LocalWorker:
    """What every worker is: something with one thread that computes.

    Attributes:
        role: its name.
        parking: what it has on its device; None: nothing, or what it keeps there it parks in a way of its own.
        lease: of the device that it shares; None: the device is its own.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.parking: Parking | None = None
        self.lease: Lease | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=role)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """While it is entered, the role is on the device; not to be entered from within itself."""
        return nullcontext() if self.lease is None else self.lease.turn(self.role)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs a function on the worker's thread, in the caller's context (job, step), turn or not. When the
        caller is cancelled the function still ends, before anything else runs on the thread: `sleep` too."""
        context = contextvars.copy_context()
        call = functools.partial(context.run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def sleep(self) -> int:
        """Leaves the device to another role. Returns bytes moved."""
        assert self.parking is not None, f"{self.role} shares a device and cannot leave it"
        return await self.run(self.parking.park)

    async def wake(self) -> int:
        """Takes the device again. Returns bytes moved."""
        assert self.parking is not None
        return await self.run(self.parking.unpark)

    async def watch(self) -> None:
        """Never returns.

        Raises:
            RoleUnavailable: the worker cannot go on, but in a new process.
        """
        await asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Lets the running method end and takes no other."""
        self._thread.shutdown(wait=True, cancel_futures=True)


W = TypeVar("W", bound=LocalWorker)


def on_worker_thread(
    method: Callable[Concatenate[W, P], R],
) -> Callable[Concatenate[W, P], Coroutine[Any, Any, R]]:
    """Makes an ordinary method of a worker an async one that waits for the role's turn and runs on the worker's
    thread. The ordinary one stays at hand as `method.__wrapped__`."""

    async def asynchronous(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
        async with self.turn():
            return await self.run(method, self, *args, **kwargs)

    functools.update_wrapper(asynchronous, method)
    return asynchronous
