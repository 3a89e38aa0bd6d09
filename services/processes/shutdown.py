"""Ends a process that serves: by a signal, with its launcher, or because its device is broken."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from typing import NoReturn

from rolemesh.workers import broken_device

log = logging.getLogger(__name__)

# Default time for running calls after a signal. Kubernetes kills a pod 30 s after SIGTERM, by default.
DRAIN_S = 25.0
ORPHAN_DRAIN_S = 1.0  # instead, if the launcher is gone or the device is broken, since nobody needs the answers
LOG_FLUSH_S = 4.0  # after draining; then the process exits even if a thread still computes


class Shutdown:
    """Records why the process ends, how long it may drain, and its exit code.

    Args:
        with_parent: also end when standard input closes.
        drain_s: seconds for running calls after a signal.
    """

    def __init__(self, with_parent: bool, drain_s: float = DRAIN_S) -> None:
        self.begun = asyncio.Event()
        self.reason = ""
        self.grace_s = self._drain_s = drain_s
        self.code = 0
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        if with_parent:
            threading.Thread(target=self._watch_stdin, daemon=True, name="parent").start()

    def with_device(self) -> None:
        """From now on also end if the device breaks: within LOG_FLUSH_S, with broken_device.EXIT_CODE."""
        broken_device.when_broken(self._on_broken_device)

    def _on_broken_device(self, why: str) -> None:
        broken_device.when_broken(None)  # other calls fail, too
        log.critical("%s; this process ends with code %d", why, broken_device.EXIT_CODE)
        end_in(LOG_FLUSH_S, broken_device.EXIT_CODE)  # even if the event loop hangs
        self.code = broken_device.EXIT_CODE
        self._loop.call_soon_threadsafe(self._begin, why, ORPHAN_DRAIN_S)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.begun.is_set():
            os._exit(128 + number)
        self._begin(f"got {number.name}", self._drain_s)

    def _watch_stdin(self) -> None:
        # os.read instead of sys.stdin, whose lock would be held at interpreter exit.
        while os.read(0, 4096):
            pass
        end_in(ORPHAN_DRAIN_S + LOG_FLUSH_S, 0)  # even if the event loop hangs
        self._loop.call_soon_threadsafe(self._begin, "the launcher is gone", ORPHAN_DRAIN_S)

    def _begin(self, reason: str, grace_s: float) -> None:
        self.reason = reason
        self.grace_s = grace_s
        self.begun.set()


def end_at_once(code: int) -> NoReturn:
    """End the process at once, even if a thread hangs in a collective or on its device."""
    logging.shutdown()
    os._exit(code)


def end_in(seconds: float, code: int) -> None:
    """End the process after some seconds, unless it has ended by then."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
