"""Where a worker computes: its thread, its ranks, the device that it may share, and the traces of its calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import ParamSpec, TypeVar

import torch

from rolemesh.config import JobConfig
from rolemesh.errors import RoleUnavailable, Unsupported
from rolemesh.ranks.executor import OneRank, RankExecutor
from rolemesh.ranks.ranks import Ranks
from rolemesh.threads import note_progress_with
from rolemesh.weights.stripe_server import StripeServer
from rolemesh.workers import broken_device
from rolemesh.workers.lease import Lease
from rolemesh.workers.numerics import kernel_without_order
from rolemesh.workers.traces import Traces

P = ParamSpec("P")
R = TypeVar("R")


class ComputingThread(ThreadPoolExecutor):
    """One thread, which has as many OpenMP threads as the one that makes it.

    Load a role on the thread on which it computes. Every thread that uses OpenMP has a team. If the teams
    together have more threads than there are cores, their threads sleep at a barrier instead of spinning, and
    each operation starts later (docs/profiling.md).

    An error that broke the device is reported (broken_device.py), and becomes RoleUnavailable: another replica
    may do the job.
    """

    def __init__(self, name: str) -> None:
        super().__init__(1, name, _use_threads, (torch.get_num_threads(),))
        self._name = name
        self._num_queued = 0
        self._progressed_at: float | None = None  # in time.monotonic(); None: no job runs
        self._counting = Lock()
        self._is_closing = False

    @property
    def is_waited_for(self) -> bool:
        """True if another job, or the shutdown, is queued on this thread. A long job may yield to it."""
        return self._is_closing or self._num_queued > 0

    @property
    def silent_s(self) -> float:
        """Seconds since the running job began, or since its last `progress`; 0 if no job runs."""
        at = self._progressed_at
        return 0.0 if at is None else time.monotonic() - at

    def submit(self, job: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Queue a job."""

        def begin() -> R:
            self._count(-1)
            self._note_progress()
            note_progress_with(self._note_progress)
            try:
                return job(*args, **kwargs)
            except Exception as error:
                if kernel := kernel_without_order(error):
                    raise Unsupported(
                        f"trainer.deterministic is true, but {kernel} of {self._name} has no deterministic "
                        "kernel on this device. Set trainer.deterministic to false, or choose another dtype or "
                        "use_remove_padding, which take other kernels"
                    ) from error
                if (broken := broken_device.error_of_device(error)) is None:
                    raise
                broken_device.report(error, self._name)
                raise RoleUnavailable(f"the device of {self._name} is broken: {broken}") from error
            finally:
                self._progressed_at = None

        future = super().submit(begin)
        self._count(1)
        future.add_done_callback(lambda done: self._count(-1) if done.cancelled() else None)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further job, and end after the queued ones."""
        self._is_closing = True
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _note_progress(self) -> None:
        self._progressed_at = time.monotonic()

    def _count(self, jobs: int) -> None:
        with self._counting:
            self._num_queued += jobs


def _use_threads(number: int) -> None:
    torch.get_num_threads()  # without this, the thread's first large operation uses the process's number
    torch.set_num_threads(number)


@dataclass(frozen=True)
class WorkerContext:
    """The thread, device lease and traces of one worker.

    Args:
        thread: runs the worker's methods.
        lease: of the device that the role shares; None: the role does not share its device.
        traces: of its operations; None: no step is traced.
        ranks: the processes over which the role's model is spread.
        executor: runs methods on these processes.
        stripe_server: of a follower, for its part of the weights that its role publishes.
    """

    thread: ComputingThread
    lease: Lease | None = None
    traces: Traces | None = None
    ranks: Ranks = field(default_factory=Ranks.alone)
    executor: RankExecutor = field(default_factory=OneRank)
    stripe_server: StripeServer | None = None

    @classmethod
    def of(cls, job: JobConfig, role: str, lease: Lease | None = None) -> WorkerContext:
        """Return a context with a thread of its own, traced in the steps that the job names."""
        return cls(ComputingThread(role), lease, Traces.of(job, role))
