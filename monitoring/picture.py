"""Draws the dashboards as pictures without Grafana: every panel at its place, over the whole run.

python -m monitoring.picture http://127.0.0.1:9090 NAMESPACE JOB docs/dashboards
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from monitoring.dashboards import DIRECTORY

Series = list[tuple[str, list[float], list[float]]]  # legend, minutes since the start, values
UNITS = {"s": "s", "bytes": "B", "Bps": "B/s", "reqps": "/s", "percentunit": "", "short": ""}


class Source:
    """A run's data in a Prometheus.

    Raises:
        ValueError: this Prometheus has no data of the run in the last day.
    """

    def __init__(self, url: str, namespace: str, job: str) -> None:
        self._client = httpx.Client(base_url=f"{url}/api/v1", timeout=60, trust_env=False)
        self._words = {"namespace": namespace, "job": job, "role": ".+"}
        of_run = f'rolemesh_training_step{{namespace="{namespace}",rolemesh_job="{job}"}}'
        times = [
            at for one in self._ask(of_run, time.time() - 86_400, time.time(), 10) for at, _ in one["values"]
        ]
        if not times:
            raise ValueError(f"this Prometheus has no data of run {job} in {namespace} in the last day")
        self._start, self._end = min(times) - 10, max(times)
        self._step = max(2.0, (self._end - self._start) / 400)
        self._words["__rate_interval"] = f"{max(20, int(4 * self._step))}s"

    def series(self, target: dict[str, Any]) -> Series:
        """Evaluate a panel's query over the whole run."""
        expr = re.sub(r"\$([a-z_]\w*)", lambda found: self._words[found[1]], target["expr"])
        found = []
        for one in self._ask(expr, self._start, self._end, self._step):
            times, values = zip(*((at, float(value)) for at, value in one["values"]), strict=True)
            minutes = [(at - self._start) / 60 for at in times]
            found.append((_legend(target["legendFormat"], one["metric"]), minutes, list(values)))
        return sorted(found)

    def _ask(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        asked: dict[str, str | float] = {"query": expr, "start": start, "end": end, "step": step}
        result: list[dict[str, Any]] = self._client.get("/query_range", params=asked).json()["data"]["result"]
        return result


def _legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda label: labels.get(label[1], ""), text)


def draw(board: dict[str, Any], source: Source, path: Path) -> None:
    """Draw a dashboard into an image file."""
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    figure = pyplot.figure(figsize=(18, 0.42 * lines), dpi=70)
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, top = place["x"] / 24, 1 - place["y"] / lines
        if panel["type"] == "row":
            figure.text(0.006, top - 0.8 / lines, panel["title"], weight="bold", size=13)
            continue
        margin = 0.05 if panel["type"] == "state-timeline" else 0.028  # its labels are longer than numbers
        width, height = place["w"] / 24 - margin - 0.01, (place["h"] - 3) / lines
        axes = figure.add_axes((left + margin, top - 1 / lines - height, width, height))
        axes.set_title(panel["title"], size=10, loc="left")
        series = [one for target in panel["targets"] for one in source.series(target)]
        {"stat": _number, "state-timeline": _timeline, "timeseries": _lines}[panel["type"]](axes, panel, series)
    figure.savefig(path)
    pyplot.close(figure)


def _number(axes: Axes, panel: dict[str, Any], series: Series) -> None:
    axes.axis("off")
    legend, _, values = max(series, key=lambda one: one[1][-1])
    names = panel["options"]["textMode"] == "name"
    shown = legend if names else f"{values[-1]:.3g} {_unit(panel)}"
    axes.text(0.0, 0.3, shown, size=20, color="tab:green")


def _timeline(axes: Axes, panel: dict[str, Any], series: Series) -> None:
    for row, (_, minutes, values) in enumerate(series):
        width = minutes[1] - minutes[0] if len(minutes) > 1 else 0.1
        spans = [(at, width) for at, value in zip(minutes, values, strict=True) if value == 1]
        axes.broken_barh(spans, (row - 0.4, 0.8), color="tab:green")
    axes.set_yticks(range(len(series)), [legend for legend, _, _ in series], size=7)
    axes.tick_params(labelsize=7)


def _lines(axes: Axes, panel: dict[str, Any], series: Series) -> None:
    stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking")
    below: dict[float, float] = {}
    for legend, minutes, values in series:
        if stacked:
            bottom = [below.get(at, 0.0) for at in minutes]
            values = [low + value for low, value in zip(bottom, values, strict=True)]
            below |= dict(zip(minutes, values, strict=True))
            axes.fill_between(minutes, bottom, values, label=legend, alpha=0.7, linewidth=0)
        else:
            axes.plot(minutes, values, label=legend, linewidth=1.2)
    if panel["fieldConfig"]["defaults"].get("min") == 0:
        axes.set_ylim(bottom=0)
    if unit := _unit(panel):
        axes.yaxis.set_major_formatter(EngFormatter(unit, sep=""))
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    if series:
        below_axes = {"loc": "upper left", "bbox_to_anchor": (-0.02, -0.06), "ncols": 5}
        axes.legend(fontsize=5.5, frameon=False, columnspacing=1, handlelength=1, **below_axes)


def _unit(panel: dict[str, Any]) -> str:
    return UNITS[panel["fieldConfig"]["defaults"]["unit"]]


if __name__ == "__main__":
    url, namespace, job, directory = sys.argv[1:]
    known = Source(url, namespace, job)
    for file in sorted(DIRECTORY.glob("*.json")):
        draw(json.loads(file.read_text()), known, Path(directory) / f"{file.stem}.png")
