"""`rolemesh …` in this process: the entry point of the installed script, without starting Python for it."""

from __future__ import annotations

import logging
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from unittest.mock import patch

from rolemesh.services.command_line.app import main


@dataclass
class Answer:
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def rolemesh(*arguments: object, width: int = 160) -> Answer:
    """Run a command; outside of an event loop, as commands start their own.

    Args:
        arguments: after `rolemesh`.
        width: columns of the terminal.
    """
    stdout, stderr, level = StringIO(), StringIO(), logging.root.level
    with (
        # A thread of an earlier test may still log, and must not find the command's stream, which is closed.
        patch.object(logging.root, "handlers", [*logging.root.handlers]),
        patch.object(sys, "argv", ["rolemesh", *map(str, arguments)]),
        patch.dict("os.environ", COLUMNS=str(width)),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        finally:
            logging.root.setLevel(level)
    return Answer(code, stdout.getvalue(), stderr.getvalue())
