"""Counts rows that wait for an answer, for scalers and for the load that the controller reports."""

from __future__ import annotations

import time
from collections.abc import Callable


class PendingRows:
    """Counts pending rows, and integrates the count over time.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = 0
        self._clock = clock
        self._counted_at = clock()
        self._row_seconds = 0.0

    def row_seconds(self, until: float) -> float:
        """Return the integral of `rows` over time, until `until` by `clock`: 10 rows for 6 s make 60."""
        return self._row_seconds + self.rows * (until - self._counted_at)

    def add(self, rows: int) -> None:
        """Add to the number of pending rows; negative to subtract."""
        now = self._clock()
        self._row_seconds = self.row_seconds(now)
        self._counted_at = now
        self.rows += rows
