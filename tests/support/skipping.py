"""Time that passes at once, for tests of deadlines."""

from __future__ import annotations

import asyncio


def skip(seconds: float) -> None:
    """Put the clock of the running event loop forward: its timers that are due by then are due now.

    Threads and gRPC's own timers keep their time.
    """
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]
