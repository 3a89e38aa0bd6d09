"""How much work there is for a role, which KEDA reads at /metrics: its pending rows over the recent steps, not
those of an instant, which are none or a whole batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from rolemesh.rpc.calling.pool import PendingRows
from rolemesh.telemetry.metrics import ROLE_LOAD_ROWS

RECENT_STEPS = 3


class Load:
    """A role's mean number of pending rows, weighted by time, over the last RECENT_STEPS steps and the running
    one:

        load = (integral of pending rows over the window) / (length of the window)

    256 rows that wait for a quarter of every step are a load of 64. Before there are so many steps the window
    begins with this object.

    Args:
        pending: counted since before this object was made.
        clock: seconds, the one that `pending` counts by.
    """

    def __init__(self, pending: PendingRows, clock: Callable[[], float] = time.monotonic) -> None:
        self._pending, self._clock = pending, clock
        # When each step of the window began, and the row-seconds until then.
        self._began = deque([(clock(), pending.row_seconds)], maxlen=RECENT_STEPS + 1)

    def step_began(self) -> None:
        """The step before this one has ended; the oldest one of the window is forgotten."""
        self._began.append((self._clock(), self._pending.row_seconds))

    def forget(self) -> None:
        """The window begins now: no step runs, or none ran for a while."""
        self._began.clear()
        self.step_began()

    def mean(self) -> float:
        """Rows; 0 while the window has no length."""
        began, row_seconds = self._began[0]
        seconds = self._clock() - began
        return (self._pending.row_seconds - row_seconds) / seconds if seconds > 0 else 0.0


class RoleLoads:
    """Every role's load, at /metrics from now on. There may be no client of a role yet: then nothing waits.

    Args:
        roles: those that the job has.

    Attributes:
        pending: each role's rows; its client is to count them here.
    """

    def __init__(self, roles: Iterable[str]) -> None:
        self.pending = {role: PendingRows() for role in roles}
        self._loads = {role: Load(pending) for role, pending in self.pending.items()}
        for role, load in self._loads.items():
            ROLE_LOAD_ROWS.labels(role).set_function(load.mean)

    def step_began(self) -> None:
        """A step begins now."""
        for load in self._loads.values():
            load.step_began()

    def paused(self) -> None:
        """No step runs, or the next one begins after a pause."""
        for load in self._loads.values():
            load.forget()
