"""vLLM's processes: where their logs go, and that they end with the process that owns the engine.

Each of them sets up logging before anything else, from logging.json: no other code of ours comes as early.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from pathlib import Path

LOGGING = Path(__file__).with_name("logging.json")
VARIABLE = "ROLEMESH_ENGINE_OWNER"  # of the environment, which they inherit: the owner's process id


class Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """In the owner's process, vLLM's records go where all others go; in vLLM's, to standard error."""

    def __init__(self) -> None:
        super().__init__()
        owner = int(os.environ.get(VARIABLE, os.getpid()))
        self._owned = owner != os.getpid()
        if self._owned:
            end_with(owner)

    def emit(self, record: logging.LogRecord) -> None:
        if self._owned:
            super().emit(record)
        else:
            logging.getLogger().handle(record)


def end_with(pid: int) -> None:
    """Ends this process with another one, also when that is killed: vLLM's processes watch each other, but not
    the one that started the first of them."""
    owner = os.pidfd_open(pid)

    def watch() -> None:
        select.select([owner], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="owner").start()
