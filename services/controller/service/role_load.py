"""Measures a role's load, which KEDA reads at /metrics: the mean number of pending rows over recent steps.

The number at one instant would not do: it is either zero or a whole batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from rolemesh.rpc.calling.pending import PendingRows
from rolemesh.telemetry.metrics import ROLE_LOAD_ROWS

RECENT_STEPS = 3


class Load:
    """A role's time-weighted mean of pending rows, over the last RECENT_STEPS steps and the current one.

        load = (integral of pending rows over the window) / (length of the window)

    For example, 256 rows that are pending during a quarter of every step are a load of 64. Before there are
    enough steps, the window begins when this object is created.

    Args:
        pending: the role's row counter.
        clock: seconds; the same clock as `pending` uses.
    """

    def __init__(self, pending: PendingRows, clock: Callable[[], float] = time.monotonic) -> None:
        self._pending = pending
        self._clock = clock
        # For each step of the window: its start, and the row-seconds up to then.
        self._began: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS + 1)
        self.step_began()

    def step_began(self) -> None:
        """Start a new step, and drop the oldest one from a full window."""
        now = self._clock()
        self._began.append((now, self._pending.row_seconds(now)))

    def forget(self) -> None:
        """Restart the window now, because no step runs or none ran for a while."""
        self._began.clear()
        self.step_began()

    def mean(self) -> float:
        """Return the mean number of pending rows; 0 while the window is empty."""
        began, row_seconds = self._began[0]
        now = self._clock()  # read once: a moment between two readings would count no rows
        return (self._pending.row_seconds(now) - row_seconds) / (now - began) if now > began else 0.0


class RoleLoads:
    """Exposes every role's load at /metrics. A role that has no client yet has no pending rows.

    Args:
        roles: the roles of the job.

    Attributes:
        pending: role to its row counter, which the role's client updates.
    """

    def __init__(self, roles: Iterable[str]) -> None:
        self.pending = {role: PendingRows() for role in roles}
        self._loads = {role: Load(pending) for role, pending in self.pending.items()}
        for role, load in self._loads.items():
            ROLE_LOAD_ROWS.labels(role).set_function(load.mean)

    def step_began(self) -> None:
        """Record that a step starts now."""
        for load in self._loads.values():
            load.step_began()

    def paused(self) -> None:
        """Record that a pause starts or ends now."""
        for load in self._loads.values():
            load.forget()
