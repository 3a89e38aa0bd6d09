"""Logs that say for which job, role and step they were written: a line of text, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

from rolemesh import context

LogFormat = Literal["text", "json"]


def setup_logging(
    format: LogFormat = "text", level: int | str = logging.INFO, stream: TextIO | None = None
) -> None:
    """Sends everything logged to one stream, in place of what was set up before.

    Args:
        format: text for people, json for collectors.
        level: the lowest level that is written.
        stream: standard error if None.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it has a line for each request


def origin() -> dict[str, str | int]:
    """Job, role and step of this context, as far as they are known."""
    known: dict[str, str | int] = {
        "job": context.job.get(),
        "role": context.role.get(),
        "step": context.step.get(),
    }
    return {name: value for name, value in known.items() if value}


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, job, role, step, message, and exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str | int] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **origin(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`12:00:00 INFO job/role step 3: message`."""

    def format(self, record: logging.LogRecord) -> str:
        known = origin()
        where = "/".join(str(known[name]) for name in ("job", "role") if name in known)
        if "step" in known:
            where += f" step {known['step']}"
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{time} {record.levelname} {where or record.name}: {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
