"""The steps of a run as a table: one header, a row for each step, as many columns as the terminal holds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console

from rolemesh.config import JobConfig

GAP = 2
STEP_WIDTH = 5  # at least
ROWS_PER_HEADER = 30
LOG_WIDTH = 80  # where nobody says how wide the reader's terminal is: a pipe, a file, a pod's log


def log_console() -> Console:
    """A console that is as wide as the terminal, and LOG_WIDTH where there is none."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=LOG_WIDTH)


@dataclass(frozen=True)
class Column:
    """One number of a step.

    Args:
        metrics: it is the first of these that the step has.
        width: in characters; a number that needs more is shown with fewer digits.
        spec: as in format().
        rank: where the terminal is too narrow, the columns with the highest ranks are left out.
    """

    heading: str
    metrics: tuple[str, ...]
    width: int
    spec: str
    rank: int


ACCURACY = "accuracy"  # no metric of its own: the mean over data sources
VALIDATION, CRITIC, REFERENCE = "val acc", "vf loss", "ref kl"  # not every job has them
COLUMNS = (
    Column("score", ("critic/score/mean",), 7, ".3f", 0),
    Column(VALIDATION, (ACCURACY,), 7, ".3f", 1),
    Column("length", ("response_length/mean",), 7, ".1f", 3),
    Column("entropy", ("actor/entropy",), 7, ".3f", 5),
    Column("pg loss", ("actor/pg_loss",), 8, ".4f", 8),
    Column(CRITIC, ("critic/vf_loss",), 8, ".4f", 9),
    Column("ppo kl", ("actor/ppo_kl",), 8, ".4f", 7),
    Column(REFERENCE, ("actor/reward_kl_penalty", "actor/kl_loss"), 8, ".4f", 4),
    Column("tokens/s", ("perf/throughput",), 8, ".0f", 6),
    Column("seconds", ("timing_s/step",), 7, ".1f", 2),
)


class StepTable:
    """Prints a row for each step.

    Args:
        job: says which columns there are.
        console: asked for its width at every step, since a terminal may be resized.
    """

    def __init__(self, job: JobConfig, console: Console) -> None:
        has = {VALIDATION: bool(job.data.val_files), CRITIC: job.uses_critic, REFERENCE: job.uses_reference}
        self._columns = [column for column in COLUMNS if has.get(column.heading, True)]
        self._console = console
        self._header = ""
        self._rows_since_header = 0

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Prints the step's row, and the header above it where it is due.

        Args:
            numbers: the step's metrics, and ACCURACY where it was validated.
        """
        step_width = max(STEP_WIDTH, len(str(step)))
        columns = that_fit(self._columns, self._console.width, step_width)
        header = "step".rjust(step_width) + _cells(column.heading.rjust(column.width) for column in columns)
        if header != self._header or self._rows_since_header == ROWS_PER_HEADER:
            self._console.print(header, style="bold", highlight=False, soft_wrap=True)
            self._header, self._rows_since_header = header, 0
        cells = _cells(_cell(column, numbers) for column in columns)
        self._console.print((str(step).rjust(step_width) + cells).rstrip(), highlight=False, soft_wrap=True)
        self._rows_since_header += 1


def that_fit(columns: list[Column], width: int, step_width: int = STEP_WIDTH) -> list[Column]:
    """The most important columns that `width` characters hold beside the step's, in their order."""
    room, kept = width - step_width, set[str]()
    for column in sorted(columns, key=lambda column: column.rank):
        room -= GAP + column.width
        if room < 0:
            break
        kept.add(column.heading)
    return [column for column in columns if column.heading in kept]


def _cells(texts: Iterable[str]) -> str:
    return "".join(" " * GAP + text for text in texts)


def _cell(column: Column, numbers: Mapping[str, float]) -> str:
    found = [numbers[metric] for metric in column.metrics if metric in numbers]
    return (number(found[0], column.spec, column.width) if found else "").rjust(column.width)


def number(value: float, spec: str, width: int = 20) -> str:
    """A number for people: zero has no sign, and one that is wider than `width` has fewer digits."""
    text = f"{value:{spec}}"
    if text.startswith("-") and not text.strip("-0.,"):
        text = text[1:]
    shorter = (f"{value:.{digits}g}" for digits in (4, 3, 2, 1))
    return text if len(text) <= width else next((t for t in shorter if len(t) <= width), text)
