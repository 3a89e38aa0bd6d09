"""Logs labelled with job, role, rank and step: one line of text, or one JSON object, per record.

Log text may be untrusted: a job's name comes from metadata, an error's text from a request. So the formatters,
not the callers, escape every unprintable character. Untrusted text can neither begin a new line nor control the
terminal.
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
    """Send all log records to one stream, replacing any earlier setup.

    Args:
        format: text for people, json for log collectors.
        level: the lowest level written.
        stream: where they go; None: to standard error.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every request


def origin() -> dict[str, str | int]:
    """Return job, role, step and rank of this context, without those that are not known."""
    known: dict[str, str | int] = {
        "job": context.job.get(),
        "role": context.role.get(),
        "step": context.step.get(),
    }
    rank = context.rank.get()
    return {name: value for name, value in known.items() if value} | ({} if rank is None else {"rank": rank})


def printable(text: str) -> str:
    r"""Replace each unprintable character by its JSON escape, such as `\n`, `\u001b` or `\u202e`.

    Unprintable are control characters, line ends of every kind, bidirectional overrides and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    r"""Like `printable`, but keep each `\n`."""
    return "\n".join(map(printable, text.split("\n")))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, origin, message, and any exception."""

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


class MessageFormatter(logging.Formatter):
    """Formats a record as its message, then any traceback, indented; the handler adds time and level."""

    def format(self, record: logging.LogRecord) -> str:
        return _with_traceback(printable(record.getMessage()), record)


class TextFormatter(logging.Formatter):
    """Formats a record as `12:00:00 INFO job/role rank 1 step 3: message`, then any traceback, indented."""

    def format(self, record: logging.LogRecord) -> str:
        known = origin()
        where = "/".join(str(known[name]) for name in ("job", "role") if name in known)
        where += "".join(f" {name} {known[name]}" for name in ("rank", "step") if name in known)
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = printable(f"{time} {record.levelname} {where or record.name}: {record.getMessage()}")
        return _with_traceback(line, record)


def _with_traceback(line: str, record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return f"{line}\n{shown(error)}" if error else line


def shown(error: BaseException) -> str:
    """Format an error's traceback with its causes, as printable, indented lines."""
    return "\n".join(f"  {printable(line)}" for line in _traceback(error))


def drop_frames(error: BaseException) -> None:
    """Keep the traceback of an error as notes, one a line, and drop its frames.

    The frames, and closures in them, keep all tensors of a failed computation alive as long as the error is
    referenced. A future of asyncio references it in a cycle.
    """
    for line in shown(error).split("\n"):
        error.add_note(line)
    chain = [error]
    for each in chain:
        each.__traceback__ = None
        causes = (each.__cause__, each.__context__)
        chain += [cause for cause in causes if cause is not None and cause not in chain]


def _traceback(error: BaseException | None) -> Iterator[str]:
    """Yield the traceback's lines of an error and its causes, the first cause first.

    An error's own text is one of them, and so is each of its notes, since they may be untrusted.
    """
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
        notes = getattr(each, "__notes__", ())
        text = "".join(traceback.format_exception_only(each)).rstrip("\n")
        yield text.removesuffix("".join(f"\n{note}" for note in notes))
        yield from notes
        members = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
        for number, member in enumerate(members, start=1):
            yield f"{number} of {len(members)}:"
            yield from (f"  {row}" for row in _traceback(member))
        if then:
            yield then
