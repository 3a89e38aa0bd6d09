"""Sets where the logs of vLLM's processes go, and ends the processes with the owner, which has the engine.

Each of these processes first sets up logging from logging.json, so this handler is our earliest code in it.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from pathlib import Path

LOGGING = Path(__file__).with_name("logging.json")
LEVEL = "VLLM_LOGGING_LEVEL"  # vLLM's environment variable; WARNING if it is not set
VARIABLE = "ROLEMESH_ENGINE_OWNER"  # environment variable with the owner's process id, inherited by them


class Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """In the owner's process, passes vLLM's records to the root logger; in vLLM's, writes them to stderr."""

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger("vllm").setLevel(os.environ.get(LEVEL, "WARNING").upper())  # not in logging.json
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
    """End this process when the process `pid` ends, even if that is killed.

    vLLM's processes watch each other, but not the process that started the first of them.
    """
    owner = os.pidfd_open(pid)

    def watch() -> None:
        select.select([owner], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="owner").start()
