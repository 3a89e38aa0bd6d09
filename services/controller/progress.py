"""The live display of a run, and the words at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from services.controller.run_dir import STEP, Record
from services.controller.status import RunStatus, State

if TYPE_CHECKING:
    from services.controller.loop import Summary

PHASES = {
    "gen": "generating",
    "old_log_prob": "policy's log-probs",
    "ref": "reference's log-probs",
    "values": "values",
    "reward": "rewards",
    "adv": "advantages",
    "update_critic": "training the critic",
    "update_actor": "training the actor",
    "update_weights": "new weights to the rollouts",
    "testing": "validating",
    "save_checkpoint": "writing a checkpoint",
}
STATES = {
    State.STARTING: "starting",
    State.STOPPING: "stops after this step",
}


class Display:
    """Step, phase, reward, accuracy, speed and time left, on two live lines; where the console is no
    terminal it shows nothing, and the console logger's lines are what there is to see.

    Args:
        console: shared with everything that prints while the display lives.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._live: Live | None = None
        self._num_shown = 0
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("", total=None)

    def show(self, status: RunStatus) -> None:
        """Takes up the state of the run."""
        if not self.console.is_terminal:
            return
        self._bar.update(
            self._task, description=status.job, completed=status.step, total=status.total_steps or None
        )
        if status.state in (State.FINISHED, State.FAILED):
            self.close()
            return
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        news = len(status.records) != self._num_shown
        self._num_shown = len(status.records)
        self._live.update(Group(self._bar, _line(status)), refresh=news)  # what a step brought is seen at once

    def close(self) -> None:
        """Clears the display."""
        if self._live:
            self._live.stop()
            self._live = None

    def summary(self, summary: Summary) -> None:
        """Before and after, a few answers, and where everything is."""
        print_summary(summary, self.console)


def _line(status: RunStatus) -> Text:
    parts = [STATES[status.state]] if status.state in STATES else []
    if status.state is State.PAUSED:  # an empty phase: between two steps
        parts = ["pauses after this step" if status.phase else "paused"]
    parts += [PHASES.get(status.phase, status.phase)] if status.phase else []
    reward = _last(status.records, "critic/score/mean")
    parts += [f"reward {reward:.3f}"] if reward is not None else []
    accuracies = accuracy_by_step(status.records)
    parts += [f"val accuracy {accuracies[-1][1]:.3f}"] if accuracies else []
    speed = _last(status.records, "perf/throughput")
    parts += [f"{speed:,.0f} tokens/s"] if speed is not None else []
    return Text("  ·  ".join(parts), style="cyan", no_wrap=True, overflow="ellipsis")


def accuracy_by_step(records: list[Record]) -> list[tuple[int, float]]:
    """Step and validation accuracy, mean over data sources, of every validation."""
    found = []
    for record in records:
        values = [v for key, v in record.items() if key.startswith("val-core/") and v is not None]
        if values:
            found.append((int(record[STEP] or 0), sum(values) / len(values)))
    return found


def _last(records: list[Record], key: str) -> float | None:
    return next((record[key] for record in reversed(records) if key in record), None)


def print_summary(summary: Summary, console: Console) -> None:
    """The end of a run, for people."""
    accuracies = accuracy_by_step(summary.records)
    if summary.answers:
        shown = Table(title="Validation answers", title_justify="left", expand=True, show_lines=True)
        shown.add_column("prompt", ratio=3)
        shown.add_column("answer", ratio=3)
        shown.add_column("truth", ratio=1)
        shown.add_column("score", justify="right")
        for row in summary.answers:
            cells = (_short(row["input"]), _short(row["output"]), _short(row["gts"]))
            shown.add_row(*map(escape, cells), f"{row['score']:g}")
        console.print(shown)

    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(overflow="fold")  # a path is of use only whole
    facts.add_row("steps", f"{summary.step} of {summary.total_steps}")
    if len(accuracies) > 1:
        (first_step, before), (last_step, after) = accuracies[0], accuracies[-1]
        facts.add_row(
            "validation accuracy",
            f"[bold]{before:.3f}[/] at step {first_step}  →  [bold]{after:.3f}[/] at step {last_step}",
        )
    elif accuracies:
        facts.add_row("validation accuracy", f"[bold]{accuracies[0][1]:.3f}[/] at step {accuracies[0][0]}")
    places = {
        "curves": summary.run_dir / "curves.png",
        "metrics": summary.run_dir / "metrics.jsonl",
        "checkpoint": summary.checkpoint,
        "training answers": summary.rollout_dumps,
        "validation answers": summary.validation_dumps,
    }
    for name, path in places.items():
        if path and path.exists():
            facts.add_row(name, escape(str(path)))
    title = "done" if summary.step == summary.total_steps else "stopped"
    console.print(Panel(facts, title=title, title_align="left", expand=False))


def _short(value: object, length: int = 300) -> str:
    text = str(value).strip()
    return text if len(text) <= length else text[: length - 1] + "…"
