"""Prints the steps of a run as a table, with a row for each step and as many columns as the terminal fits."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console

from rolemesh.config import JobConfig

GAP = 2
STEP_WIDTH = 5  # minimum width of the step column
ROWS_PER_HEADER = 30
LOG_WIDTH = 80  # used if the reader's terminal width is unknown: a pipe, a file, a pod's log


def log_console(kind: type[Console] = Console) -> Console:
    """Make a console as wide as the terminal or COLUMNS; without either, LOG_WIDTH wide."""
    console = kind()
    return console if console.is_terminal or "COLUMNS" in os.environ else kind(width=LOG_WIDTH)


@dataclass(frozen=True)
class TableColumn:
    """A column of the table: one number of each step.

    Args:
        heading: its heading.
        metrics: metric names; the column shows the first one that the step has.
        width: width in characters; longer numbers are shown with fewer digits.
        spec: format spec, as in format().
        rank: if the terminal is too narrow, columns with the highest ranks are left out.
    """

    heading: str
    metrics: tuple[str, ...]
    width: int
    spec: str
    rank: int


ACCURACY = "accuracy"  # not a metric of the step: the mean over data sources
# columns that not every job has
VALIDATION = "val acc"
CRITIC = "vf loss"
REFERENCE = "ref kl"
COLUMNS = (
    TableColumn("loss", ("actor/loss",), 8, ".4f", 0),
    TableColumn("val loss", ("val/loss",), 8, ".4f", 1),
    TableColumn("accuracy", ("rewards/accuracies",), 8, ".3f", 2),
    TableColumn("margin", ("rewards/margins",), 7, ".3f", 4),
    TableColumn("score", ("critic/score/mean",), 7, ".3f", 0),
    TableColumn(VALIDATION, (ACCURACY,), 7, ".3f", 1),
    TableColumn("length", ("response_length/mean",), 7, ".1f", 3),
    TableColumn("entropy", ("actor/entropy",), 7, ".3f", 5),
    TableColumn("pg loss", ("actor/pg_loss",), 8, ".4f", 8),
    TableColumn(CRITIC, ("critic/vf_loss",), 8, ".4f", 9),
    TableColumn("ppo kl", ("actor/ppo_kl",), 8, ".4f", 7),
    TableColumn(REFERENCE, ("actor/reward_kl_penalty", "actor/kl_per_token"), 8, ".4f", 4),
    TableColumn("tokens/s", ("perf/throughput",), 8, ".0f", 6),
    TableColumn("seconds", ("timing_s/step",), 7, ".1f", 2),
)


class StepTable:
    """Prints a row for each step.

    Args:
        job: determines the columns.
        console: where to print. Its width is read at every step, because a terminal may be resized.
    """

    def __init__(self, job: JobConfig, console: Console) -> None:
        has = {CRITIC: job.uses_critic, REFERENCE: job.estimates and job.uses_reference}
        has |= dict.fromkeys(("score", "entropy", "pg loss", "ppo kl"), job.estimates)
        has |= {VALIDATION: job.estimates and job.data.has_validation, "loss": not job.estimates}
        has |= dict.fromkeys(("accuracy", "margin"), job.page.learns_from == "pairs")
        has["val loss"] = not job.estimates and job.data.has_validation
        self._columns = [column for column in COLUMNS if has.get(column.heading, True)]
        self._console = console
        self._header = ""
        self._rows_since_header = 0

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Print the step's row, preceded by the header if it changed or ROWS_PER_HEADER rows have passed.

        Args:
            step: the step.
            numbers: the step's metrics, and ACCURACY if the step was validated.
        """
        step_width = max(STEP_WIDTH, len(str(step)))
        columns = that_fit(self._columns, self._console.width, step_width)
        header = "step".rjust(step_width) + _cells(column.heading.rjust(column.width) for column in columns)
        if header != self._header or self._rows_since_header == ROWS_PER_HEADER:
            self._console.print(header, style="bold", highlight=False, soft_wrap=True)
            self._header = header
            self._rows_since_header = 0
        cells = _cells(_cell(column, numbers) for column in columns)
        self._console.print((str(step).rjust(step_width) + cells).rstrip(), highlight=False, soft_wrap=True)
        self._rows_since_header += 1


def that_fit(columns: list[TableColumn], width: int, step_width: int = STEP_WIDTH) -> list[TableColumn]:
    """Return the most important columns that fit into `width` beside the step column, in their order."""
    room = width - step_width
    kept = set[str]()
    for column in sorted(columns, key=lambda column: column.rank):
        room -= GAP + column.width
        if room < 0:
            break
        kept.add(column.heading)
    return [column for column in columns if column.heading in kept]


def _cells(texts: Iterable[str]) -> str:
    return "".join(" " * GAP + text for text in texts)


def _cell(column: TableColumn, numbers: Mapping[str, float]) -> str:
    found = [numbers[metric] for metric in column.metrics if metric in numbers]
    return (number(found[0], column.spec, column.width) if found else "").rjust(column.width)


def number(value: float, spec: str, width: int = 20) -> str:
    """Format a number for people: zero has no sign, and a number wider than `width` gets fewer digits."""
    text = f"{value:{spec}}"
    if text.startswith("-") and not text.strip("-0.,"):
        text = text[1:]
    shorter = (f"{value:.{digits}g}" for digits in (4, 3, 2, 1))
    return text if len(text) <= width else next((t for t in shorter if len(t) <= width), text)
