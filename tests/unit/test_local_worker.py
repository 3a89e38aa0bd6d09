"""A worker's thread: one function after another, and who waits for it."""

from __future__ import annotations

import asyncio
import threading

from rolemesh.workers.local import LocalWorker


async def test_it_is_waited_for_while_something_is_in_line_that_nobody_has_cancelled() -> None:
    worker, began, go_on = LocalWorker("rollout"), threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        assert go_on.wait(60)

    holding = asyncio.create_task(worker.run(hold))
    await asyncio.to_thread(began.wait)
    alone = worker.is_waited_for
    first, second = (asyncio.create_task(worker.run(threading.get_ident)) for _ in range(2))
    await asyncio.sleep(0)  # they have begun
    two = worker.is_waited_for
    first.cancel()
    await asyncio.wait([first])
    one = worker.is_waited_for
    second.cancel()
    await asyncio.wait([second])
    none = worker.is_waited_for
    go_on.set()
    await holding
    assert (alone, two, one, none) == (False, True, True, False)
    assert await worker.run(lambda: worker.is_waited_for) is False
    worker.close()
