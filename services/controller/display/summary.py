"""Summarises how a run ended, and prints the summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from rolemesh.services.controller.display.table import number
from rolemesh.services.controller.record import METRICS_FILE, STEP, Record
from rolemesh.telemetry.logs import printable_lines


@dataclass
class Summary:
    """How a run ended.

    Args:
        run_dir: contains curves.png, metrics.jsonl and config.yaml.
        step: the last completed step.
        total_steps: number of steps of the job.
        records: records of all steps, also of those before a resume.
        answers: a few rows of the last validation, as in the dumps.
        checkpoint: the newest one; None if none was written.
        rollout_dumps, validation_dumps: directories of the responses; None if the job keeps none.
    """

    run_dir: Path
    step: int
    total_steps: int
    records: list[Record]
    answers: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: Path | None = None
    rollout_dumps: str | None = None
    validation_dumps: str | None = None


def accuracy_by_step(records: list[Record]) -> list[tuple[int, float]]:
    """Return step and accuracy (mean over data sources) of every validation."""
    found = []
    for record in records:
        of_sources = [v for key, v in record.items() if key.startswith("val-core/") and "/mean@" in key]
        values = [value for value in of_sources if value is not None]
        if values:
            found.append((int(record[STEP] or 0), sum(values) / len(values)))
    return found


def print_summary(summary: Summary, console: Console) -> None:
    """Print the summary of a run for people."""
    accuracies = accuracy_by_step(summary.records)
    if summary.answers:
        shown = Table(title="Validation answers", title_justify="left", expand=True, show_lines=True)
        shown.add_column("prompt", ratio=3)
        shown.add_column("answer", ratio=3)
        shown.add_column("truth", ratio=1)
        shown.add_column("score", justify="right")
        for row in summary.answers:
            cells = (_short(row["input"]), _short(row["output"]), _short(row["gts"]))
            shown.add_row(*map(escape, cells), number(row["score"], "g"))
        console.print(shown)

    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")  # wrap long paths instead of cutting them
    facts.add_row("steps", f"{summary.step} of {summary.total_steps}")
    if len(accuracies) > 1:
        first_step, before = accuracies[0]
        last_step, after = accuracies[-1]
        facts.add_row(
            "validation accuracy",
            f"[bold]{before:.3f}[/] at step {first_step}  →  [bold]{after:.3f}[/] at step {last_step}",
        )
    elif accuracies:
        facts.add_row("validation accuracy", f"[bold]{accuracies[0][1]:.3f}[/] at step {accuracies[0][0]}")
    places = {
        "curves": summary.run_dir / "curves.png",
        "metrics": summary.run_dir / METRICS_FILE,
        "checkpoint": summary.checkpoint,
        "training answers": summary.rollout_dumps,
        "validation answers": summary.validation_dumps,
    }
    for name, path in places.items():
        if path and Path(path).exists():
            facts.add_row(name, escape(str(path)))
    title = "done" if summary.step == summary.total_steps else "stopped"
    console.print(Panel(facts, title=title, title_align="left", expand=False))


def _short(value: object, length: int = 300) -> str:
    text = printable_lines(str(value).strip())
    return text if len(text) <= length else text[: length - 1] + "…"
