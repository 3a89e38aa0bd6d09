"""Draws curves.png, the metrics of a run at a glance."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolemesh.services.controller.record import STEP, Record

log = logging.getLogger(__name__)

Line = tuple[str, list[float], list[float]]  # label, steps, values

INK = "#1f2937"
GRID = "#e5e7eb"
# A later line lets the earlier ones show between its dashes: score and score less KL may be the same.
LINES = (("#2563eb", "-"), ("#d97706", "--"), ("#16a34a", ":"), ("#dc2626", "-."))

# Title to metric keys with their legends. A key that ends in "*" matches all metrics with that prefix.
PANELS: dict[str, dict[str, str]] = {
    "Reward": {"critic/score/mean": "score", "critic/rewards/mean": "score less KL"},
    "Validation accuracy": {"val-core/*": ""},
    "KL, nats": {
        "actor/reward_kl_penalty": "to the reference",
        "actor/kl_per_token": "to the reference, in the loss",
        "actor/ppo_kl": "of the update",
    },
    "Entropy, nats": {"actor/entropy": "entropy"},
    "Response length, tokens": {"response_length/mean": "mean", "response_length/max": "longest"},
    "Losses": {
        "actor/loss": "training",
        "val/loss": "validation",
        "actor/pg_loss": "policy",
        "critic/vf_loss": "value",
    },
    "Conversation, per row": {
        "conversation/turns/mean": "turns",
        "conversation/tool_calls/mean": "tool calls",
        "conversation/tool_errors/mean": "failed tool calls",
    },
    "Reward by the environment": {"conversation/reward/mean": "reward"},
}

# axes that start at 0, to show changes in proportion
FROM_ZERO = ("Entropy, nats", "Response length, tokens", "Conversation, per row")


def draw_curves(records: Sequence[Record], path: Path, title: str) -> None:
    """Draw the panels over steps; those without any metric of the job are left out.

    What fails is logged: a missing picture must not hide how a run ended.

    Args:
        records: the lines of metrics.jsonl.
        path: path of the PNG.
        title: the job's name.
    """
    try:
        _draw(records, path, title)
    except Exception as error:
        log.warning("%s could not be written: %s", path, error)


def _draw(records: Sequence[Record], path: Path, title: str) -> None:
    records = sorted(
        records, key=lambda record: record[STEP] or 0
    )  # a later validation may be of an earlier step
    panels = panels_of(records)
    if not panels:
        return
    import matplotlib.ticker as ticker
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width = 4.6 * columns
    height = 3.1 * rows + 0.5
    figure = Figure(figsize=(width, height), dpi=130, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(_plain(title), fontsize=13, fontweight="bold", color=INK, y=1 - 0.25 / height)
    # Margins in inches that every label fits into. Matplotlib's own layout would draw everything once more.
    figure.subplots_adjust(
        0.6 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.7 / height, wspace=0.6 / 3.9, hspace=0.75 / 2.3
    )
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (name, lines) in zip(grid.flat, panels, strict=False):
        for (colour, style), (label, steps, values) in zip(LINES * 8, lines, strict=False):
            _draw_line(axes, colour, style, label, steps, values)
        axes.set_title(name, fontsize=11, color=INK, loc="left")
        axes.set_xlabel("step", fontsize=9, color=INK)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=6))
        axes.grid(True, color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, colors=INK)
        if name == "Validation accuracy":
            axes.set_ylim(-0.03, 1.03)
        if name in FROM_ZERO:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        if len(lines) > 1 or name == "Validation accuracy":
            axes.legend(fontsize=8, frameon=False)
    canvas.print_png(path)


def panels_of(records: Sequence[Record]) -> list[tuple[str, list[Line]]]:
    """Return the title and the lines of each panel that has any."""
    return [(title, lines) for title, keys in PANELS.items() if (lines := _lines(records, keys))]


def _plain(text: str) -> str:
    """Return text for matplotlib, which would read what is between two $ as a formula."""
    return text.replace("$", r"\$")


def _draw_line(axes: Any, colour: str, style: str, label: str, steps: list[float], values: list[float]) -> None:
    noisy = len(values) > 30
    axes.plot(
        steps,
        values,
        color=colour,
        linestyle=style,
        alpha=0.3 if noisy else 1,
        linewidth=1.0 if noisy else 1.6,
        marker=None if noisy else "o",
        markersize=3.5,
        label=None if noisy else label,
    )
    if noisy:
        axes.plot(steps, _smooth(values), color=colour, linestyle=style, linewidth=1.8, label=label)


def _smooth(values: list[float], window: int = 9) -> list[float]:
    """Compute a centred moving mean, with a narrower window at both ends."""
    half = window // 2
    spans = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(span) / len(span) for span in spans]


def _lines(records: Sequence[Record], keys: dict[str, str]) -> list[Line]:
    """Return label, steps and values of each matching metric in the records."""
    wanted: dict[str, str] = {}
    for key, label in keys.items():
        if key.endswith("*"):
            found = sorted({name for record in records for name in record if name.startswith(key[:-1])})
            wanted |= {name: name.removeprefix(key[:-1]) for name in found}
        else:
            wanted[key] = label
    lines = []
    for key, label in wanted.items():
        points = [(record[STEP], record[key]) for record in records if record.get(key) is not None]
        if points:
            steps, values = zip(*points, strict=True)
            lines.append((_plain(label), list(steps), list(values)))
    return lines
