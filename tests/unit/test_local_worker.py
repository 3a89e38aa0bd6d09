"""A worker's thread: one function after another, and who waits for it."""

from __future__ import annotations

import threading

from rolemesh.workers.local import ComputingThread


def test_a_thread_is_waited_for_while_something_is_in_line_and_at_its_end() -> None:
    thread, began, go_on = ComputingThread("actor"), threading.Event(), threading.Event()

    def hold() -> bool:
        began.set()
        assert go_on.wait(60)
        return thread.is_waited_for

    holding = thread.submit(hold)
    assert began.wait(60)
    alone = thread.is_waited_for
    last = thread.submit(lambda: thread.is_waited_for)
    go_on.set()
    assert (alone, holding.result(), last.result()) == (False, True, False)
    began.clear()
    go_on.clear()
    ending = thread.submit(hold)
    assert began.wait(60)
    thread.shutdown(wait=False)
    go_on.set()
    assert ending.result()
