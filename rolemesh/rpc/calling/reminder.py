"""Logs repeatedly which replicas are waited for, so that no wait is silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rolemesh.rpc.calling.replica import Replica

log = logging.getLogger(__name__)

REMIND_S = 30.0  # between two lines


class Reminder:
    """Logs every REMIND_S seconds which replicas of a role are waited for, while anything waits.

    The line is a warning if a replica has another fingerprint, because only a restart helps. Otherwise its
    level is info.

    Args:
        role: the role.
        replicas: returns the replicas that are waited for.
    """

    def __init__(self, role: str, replicas: Callable[[], Sequence[Replica]]) -> None:
        self._role = role
        self._replicas = replicas
        self._num_waiting = 0
        self._since = 0.0
        self._next: asyncio.TimerHandle | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Remind within the context. Several waits at once share one line."""
        self._num_waiting += 1
        if self._num_waiting == 1:
            self._since = time.monotonic()
            self._plan()
        try:
            yield
        finally:
            self._num_waiting -= 1
            if not self._num_waiting and self._next:
                self._next.cancel()

    def _plan(self) -> None:
        self._next = asyncio.get_running_loop().call_later(REMIND_S, self._remind)

    def _remind(self) -> None:
        late = [replica for replica in self._replicas() if replica.problem or not replica.live]
        known = [f"at {replica.address}: {replica.problem}" for replica in late if replica.problem]
        refused = any(replica.mismatch and replica.mismatch == replica.problem for replica in late)
        where = "; ".join(known) or ", ".join(replica.address for replica in late) or "there is no address yet"
        seconds = time.monotonic() - self._since
        level = logging.WARNING if refused else logging.INFO
        log.log(level, "%s: waiting for a replica, for %.0f s (%s)", self._role, seconds, where)
        self._plan()
