"""Calls the logger of a library on a thread of its own, so that a server that is slow or away holds no step."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import Protocol

from rolemesh.errors import RolemeshError
from rolemesh.roles import Metrics
from rolemesh.telemetry import context

log = logging.getLogger(__name__)

MOST_WAITING = 1000  # steps of a logger, some 10 kB each
END_S = 30.0  # the longest wait for all loggers at the end of a run


class LibraryLogger(Protocol):
    """A target for step metrics that may take long, e.g. until a server answers. One thread makes all calls."""

    def begin(self) -> None:
        """Connect. It is called again if it failed."""
        ...

    def log(self, step: int, metrics: Metrics) -> None:
        """Write one step's metrics. One that cannot be written keeps no other from being written."""
        ...

    def close(self) -> None:
        """Flush buffered metrics, and close."""
        ...


class OwnThread:
    """Calls a logger on a thread of its own, step after step, behind the run.

    A step that cannot be logged causes a warning. A logger that could not begin tries it again with each step.

    Args:
        logger: nothing else calls it.

    Attributes:
        name: the logger's class, for warnings.
        begun: done when the logger has begun; holds the error if it could not.
    """

    def __init__(self, logger: LibraryLogger) -> None:
        self.name = type(logger).__name__
        self.begun: Future[None] = Future()
        self.begun.set_running_or_notify_cancel()  # so cancelling a wait for it does not cancel it
        self._logger = logger
        self._steps: SimpleQueue[tuple[int, Metrics] | None] = SimpleQueue()  # None: no further steps
        self._ended = threading.Event()  # the thread has ended, or nobody waits for it any more
        self._given_up = False
        # A daemon: the process may end while a server does not answer.
        threading.Thread(target=copy_context().run, args=(self._work,), name=self.name, daemon=True).start()

    def log(self, step: int, metrics: Metrics) -> None:
        """Log a step later.

        Raises:
            RolemeshError: MOST_WAITING steps are waiting.
        """
        if self._steps.qsize() >= MOST_WAITING:
            raise RolemeshError(f"{MOST_WAITING} earlier steps are still waiting")
        self._steps.put((step, metrics))

    def finish(self) -> None:
        """Close the logger after the steps that are waiting."""
        self._steps.put(None)

    def wait(self, until: float) -> None:
        """Block until the logger is closed, at most until this time of time.monotonic()."""
        self._ended.wait(max(0.0, until - time.monotonic()))

    def give_up(self) -> None:
        """Make no further call if the logger is not closed yet, and warn. A call in progress is left behind."""
        if not self._ended.is_set():
            self._given_up = True
            self._ended.set()
            warn_of_close(self.name, TimeoutError("it is still busy"))

    def _work(self) -> None:
        try:
            self._logger.begin()
            self.begun.set_result(None)
            has_begun = True
        except BaseException as error:  # a library may want to exit
            self.begun.set_exception(error)
            has_begun = False
        while (waiting := self._steps.get()) and not self._given_up:
            step, metrics = waiting
            context.step.set(step)
            try:
                if not has_begun:
                    self._logger.begin()
                    has_begun = True
                self._logger.log(step, metrics)
            except BaseException as error:  # likewise
                warn_of_step(self.name, step, error)
        try:
            if has_begun and not self._given_up:
                self._logger.close()
        except BaseException as error:  # it must neither replace the run's own error nor fail the run
            warn_of_close(self.name, error)
        self._ended.set()


def warn_of_step(logger: str, step: int, error: BaseException) -> None:
    """Warn that a logger lacks a step, or a part of it."""
    log.warning(
        "%s could not log step %d (metrics.jsonl has it): %s: %s", logger, step, type(error).__name__, error
    )


def warn_of_close(logger: str, error: BaseException) -> None:
    """Warn that a logger may lack the last steps."""
    log.warning(
        "%s could not be closed, and may lack the last steps (metrics.jsonl has them): %s: %s",
        logger,
        type(error).__name__,
        error,
    )
