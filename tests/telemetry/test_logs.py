"""No character that cannot be printed reaches a log, whoever wrote it where."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rolemesh.services.controller.display.summary import Summary, print_summary
from rolemesh.services.processes.launch import log_to
from rolemesh.telemetry import context
from rolemesh.telemetry.logs import setup_logging

# One of each kind: NUL, BEL, line ends, ESC, DEL, C1 (NEL, CSI), bidirectional override and isolate, line and
# paragraph separator, lone surrogate, byte order mark, tag character.
HOSTILE = "\0\a\n\r\v\f\x1c\x1b[31m\x7f\x85\x9b\u200b\u202e\u2066\u2028\u2029\ud800\ufeff\U000e0041"
FORGED = "x\n12:00:00 ERROR actor: forged"
log = logging.getLogger("test")


@pytest.fixture
def written(request: pytest.FixtureRequest) -> Iterator[io.TextIOWrapper]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", newline="\n")
    setup_logging(getattr(request, "param", "text"), stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.TextIOWrapper) -> list[str]:
    stream.flush()
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode("utf-8").split("\n")[:-1]


def unprintable(text: str) -> set[str]:
    """Control, format, surrogate, private, unassigned, and the two that separate lines."""
    return {char for char in text if unicodedata.category(char)[0] == "C" or char in "\u2028\u2029"}


@pytest.mark.parametrize("written", ["text", "json"], indirect=True)
def test_a_record_is_one_printable_line_whatever_it_holds(written: Any) -> None:
    """The message, the job and the error may hold any character."""
    token = context.job.set(HOSTILE)
    try:
        log.warning("%s and %s", HOSTILE, FORGED)
        log.warning(HOSTILE)
        log.error("it failed: %s", ValueError(HOSTILE + FORGED))
    finally:
        context.job.reset(token)
    found = lines(written)
    assert len(found) == 3
    assert not unprintable("".join(found))
    assert len(written.buffer.getvalue().splitlines()) == 3
    assert all(
        text in found[0] for text in (r"\n12:00:00", r"\u001b[31m", r"\u202e", r"\ud800", r"\udb40\udc41")
    )


@pytest.mark.parametrize("written", ["json"], indirect=True)
def test_json_gives_back_what_was_logged(written: Any) -> None:
    log.warning("%s", HOSTILE + "grüße 你好")
    [line] = lines(written)
    assert json.loads(line)["message"] == HOSTILE + "grüße 你好"
    assert "grüße 你好" in line


def test_text_that_can_be_printed_stays_as_it_is(written: Any) -> None:
    log.warning("grüße 你好 🙂 C:\\new %s", '"quoted"')
    assert lines(written)[0].endswith('WARNING test: grüße 你好 🙂 C:\\new "quoted"')


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("written", ["text", "json"], indirect=True)
def test_a_traceback_has_its_lines_and_the_errors_text_has_one(written: Any) -> None:
    error = raised(RuntimeError(FORGED), raised(KeyError(HOSTILE)))
    group = raised(ExceptionGroup(FORGED, [error]))
    group.add_note(FORGED)
    log.error("it failed", exc_info=group)
    found = lines(written)
    assert not unprintable("".join(found))
    if len(found) == 1:
        assert json.loads(found[0])["exception"].count("Traceback") == 3
        return
    assert [line for line in found if not line.startswith(" ")] == found[:1]  # so none can look like a record
    text = "\n".join(found)
    assert text.count("Traceback (most recent call last):") == 3
    assert text.count(r"x\n12:00:00 ERROR actor: forged") == 3
    assert "    raise error from cause" in text
    assert text.index("KeyError") < text.index("which led to:") < text.index("RuntimeError")
    assert text.index("ExceptionGroup: x") < text.index("1 of 1:") < text.index("KeyError")


def test_causes_that_go_in_a_circle_come_to_an_end(written: Any) -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    log.error("it failed", exc_info=first)
    assert sum("ValueError" in line for line in lines(written)) == 2


def test_every_character_that_unicode_calls_a_control_is_escaped(written: Any) -> None:
    every = [chr(code) for code in range(sys.maxunicode + 1)]
    hidden = [char for char in every if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    log.warning("%s", "".join(hidden))
    assert lines(written)[0].isprintable()


@pytest.mark.parametrize(
    ("written", "words"),
    [("text", " INFO actor rank 0: it computes"), ("json", '"role": "actor", "rank": 0, "message"')],
    ids=["text", "json"],
    indirect=["written"],
)
def test_a_rank_is_named_also_rank_0(written: Any, words: str) -> None:
    tokens = context.role.set("actor"), context.rank.set(0)
    try:
        log.info("it computes")
    finally:
        context.role.reset(tokens[0])
        context.rank.reset(tokens[1])
    assert words in lines(written)[0]


# --------------------------------------------------------------------------------- `rolemesh run`


def test_a_record_beside_the_live_display_is_printable(written: Any) -> None:
    console = Console(file=io.StringIO(), width=1000)
    log_to(console)
    log.warning("%s and %s", HOSTILE, FORGED)
    try:
        raise ValueError(HOSTILE + FORGED)
    except ValueError:
        log.exception("failed")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert not unprintable(shown.replace("\n", ""))
    first, second, *traceback = (line.rstrip() for line in shown.splitlines())
    assert first.split()[2] == "WARNING"
    assert r"\u001b[31m" in first and r"\n12:00:00 ERROR" in first  # noqa: PT018
    assert second.endswith("failed")
    assert "ValueError" in traceback[-1]


def test_a_summary_shows_answers_as_printable_lines() -> None:
    console = Console(file=io.StringIO(), width=1000)
    answers = [{"input": "two\nlines", "output": HOSTILE + FORGED, "gts": [HOSTILE], "score": 1.0}]
    print_summary(Summary(Path("run"), 1, 1, [], answers), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert not unprintable(shown.replace("\n", ""))
    assert r"\u001b[31m" in shown
    assert [line for line in shown.splitlines() if "lines" in line and "two" not in line]
