"""`rolemesh …` and `python -m rolemesh`: the command line in a process of its own."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from rolemesh.services.command_line import app


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    try:
        app.main()
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        _end(ended.code)
    _end(0)


def _end(code: int) -> NoReturn:
    """End the process without freeing its objects.

    Freeing all of torch takes a second, and after freeing a part some libraries report the rest as leaked.
    Threads are joined, exit functions run and output is flushed, as when multiprocessing ends a fork.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # of a process that was started with it closed
                stream.flush()
        except (OSError, ValueError):  # a full disk, or a reader that is gone
            code = code or 120  # as Python ends then
    os._exit(code)


if __name__ == "__main__":
    main()
