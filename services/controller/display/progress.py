"""Shows a run live in the terminal."""

from __future__ import annotations

import os
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from rolemesh.services.controller.display.summary import Summary, accuracy_by_step, print_summary
from rolemesh.services.controller.display.table import log_console, number
from rolemesh.services.controller.service.status import RunStatus, State
from rolemesh.telemetry.logs import printable

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
    State.FINISHED: "has ended",
    State.FAILED: "has failed",
}


class RunConsole(Console):
    """A console that falls silent where its output cannot be written, so that the run goes on.

    Its reader may have ended (`| tee` at Ctrl-C), the terminal may be closed, the disk full.
    """

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print nothing more. Rich's own method ends the process."""
        self.quiet = True
        with suppress(OSError), open(os.devnull, "wb") as nowhere:  # else the flush at exit fails
            os.dup2(nowhere.fileno(), self.file.fileno())


class Display:
    """Shows step, phase, reward, accuracy, speed and time left on two live lines.

    If the console is not a terminal it shows nothing; the console logger's table remains.

    Args:
        console: the console; anything else that prints meanwhile must use the same one. None: a RunConsole.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or log_console(RunConsole)
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

    def show(self, status: RunStatus, *below: RenderableType) -> None:
        """Show the state of the run, and `below` under it."""
        if not self.console.is_terminal:
            return
        job = escape(printable(status.job))
        self._bar.update(self._task, description=job, completed=status.step, total=status.total_steps or None)
        if status.state in (State.FINISHED, State.FAILED):
            self.close()
            return
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        news = len(status.records) != self._num_shown
        self._num_shown = len(status.records)
        # Refresh at once when a step has ended.
        self._live.update(Group(self._bar, line_of(status), *below), refresh=news)

    def close(self) -> None:
        """Clear the display."""
        if self._live:
            self._live.stop()
            self._live = None

    def summary(self, summary: Summary) -> None:
        """Print accuracy before and after, a few answers, and the paths of all results."""
        print_summary(summary, self.console)


def line_of(status: RunStatus) -> Text:
    """Format state, phase, reward, accuracy and speed as one line."""
    parts = [STATES[status.state]] if status.state in STATES else []
    if status.state is State.PAUSED:  # an empty phase means that no step runs
        parts = ["pauses after this step" if status.phase else "paused"]
    parts += [PHASES.get(status.phase, status.phase)] if status.phase else []
    parts += [status.found] if status.found else []
    reward = status.latest.get("critic/score/mean")
    parts += [f"reward {number(reward, '.3f')}"] if reward is not None else []
    accuracies = accuracy_by_step([status.latest])
    parts += [f"val accuracy {accuracies[-1][1]:.3f}"] if accuracies else []
    speed = status.latest.get("perf/throughput")
    parts += [f"{speed:,.0f} tokens/s"] if speed is not None else []
    return Text(printable("  ·  ".join(parts)), style="cyan", no_wrap=True, overflow="ellipsis")
