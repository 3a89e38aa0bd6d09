"""Logs that say for which job, role and step they were written: a line of text, or one JSON object a line.

What a line says may come from a stranger: a job's name from metadata, an error's text from what was sent. So
the formatters, and not those who log, escape every character that cannot be printed. No stranger begins a line
or speaks to the terminal.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Literal, TextIO

from rolemesh.telemetry import context

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


def printable(text: str) -> str:
    r"""The text with an escape of JSON, such as `\n`, `\u001b` or `\u202e`, for each character that cannot be
    printed: control characters, line ends of every kind, bidirectional overrides, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


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
        return printable(json.dumps(entry, ensure_ascii=False))


class TextFormatter(logging.Formatter):
    """`12:00:00 INFO job/role step 3: message`, and below it a traceback where there is one, indented."""

    def format(self, record: logging.LogRecord) -> str:
        known = origin()
        where = "/".join(str(known[name]) for name in ("job", "role") if name in known)
        if "step" in known:
            where += f" step {known['step']}"
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = printable(f"{time} {record.levelname} {where or record.name}: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        return f"{line}\n{shown(error)}" if error else line


def shown(error: BaseException) -> str:
    """An error's traceback with its causes, in printable lines, each of them indented."""
    return "\n".join(f"  {printable(line)}" for line in _traceback(error))


def _traceback(error: BaseException | None) -> Iterator[str]:
    """The lines that Python shows for an error and its causes; its text, which may be a stranger's, is one."""
    chain: list[tuple[BaseException, str]] = []
    then = ""
    while error is not None and all(error is not known for known, _ in chain):
        chain.append((error, then))
        then = "which led to:" if error.__cause__ else "while that was handled:"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    for each, then in reversed(chain):
        yield "Traceback (most recent call last):"
        for frame in traceback.format_tb(each.__traceback__):
            yield from frame.rstrip("\n").split("\n")
        yield "".join(traceback.format_exception_only(each)).rstrip("\n")
        members = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        for number, member in enumerate(members, start=1):
            yield f"{number} of {len(members)}:"
            yield from (f"  {row}" for row in _traceback(member))
        if then:
            yield then
