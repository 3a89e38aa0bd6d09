"""Stops a run when a signal asks for it."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from rolemesh.errors import WRONG_INPUT
from rolemesh.services.controller.display.summary import Summary
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.service.status import State

log = logging.getLogger(__name__)


class StopOnSignal:
    """Handles SIGINT and SIGTERM.

    The first signal stops the run after the current step, or at once while roles start. The second ends it at
    once. Checkpoints stay intact either way.

    Args:
        run: the run.
        on_signal: called at each signal, before anything else.
        leave_scale_down_to_next_start: after a signal, leave the end of the run to the next start, which scales
            the roles down. An upgrade may have replaced this controller by one that makes more steps.
    """

    def __init__(
        self,
        run: Run,
        on_signal: Callable[[], None] = lambda: None,
        leave_scale_down_to_next_start: bool = False,
    ) -> None:
        self._run = run
        self._at_signal = on_signal
        self._leaves_end = leave_scale_down_to_next_start
        self._signal: signal.Signals | None = None

    def __enter__(self) -> StopOnSignal:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)
        self._run.display.close()
        if self._signal and exception[0] is asyncio.CancelledError:
            self._say("ended at once; the last checkpoint, if any, is intact")
            raise SystemExit(128 + self._signal)
        if self._signal and self._leaves_end and isinstance(exception[1], WRONG_INPUT):
            log.error("%s. Its roles are left to the next start, as this one was asked to end", exception[1])
            raise SystemExit(128 + self._signal)

    def end(self, summary: Summary) -> None:
        """Display a run's summary. Exit with the signal's code if it was stopped, or leaves the run's end."""
        self._run.display.summary(summary)
        if self._signal and summary.step < summary.total_steps:
            self._say(
                f"stopped after step {summary.step}; the same command resumes from {_where(summary.checkpoint)}"
            )
            raise SystemExit(128 + self._signal)
        if self._signal and self._leaves_end:
            self._say("the run has ended; its roles are left to the next start, as this one was asked to end")
            raise SystemExit(128 + self._signal)

    def _on_signal(self, number: signal.Signals) -> None:
        assert self._task is not None
        self._at_signal()
        is_first = self._signal is None
        self._signal = number
        if not is_first or self._run.status.state is State.STARTING:
            self._task.cancel()
            return
        self._run.request_stop()
        self._say(f"{number.name}: stopping after this step (send it again to stop at once)")

    def _say(self, words: str) -> None:
        self._run.display.console.print(words, style="yellow", highlight=False)


def _where(checkpoint: Path | None) -> str:
    return str(checkpoint) if checkpoint else "the start, because no checkpoint was written (trainer.save_freq)"
