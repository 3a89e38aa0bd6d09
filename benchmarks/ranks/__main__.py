"""What it costs that a role is spread over ranks: orders, an update, and publishing. `make bench-ranks`.

    python -m benchmarks.ranks

One rank has no path of its own beside which it could be measured: its commands are plain calls, and
Ranks.alone() is the identity. Writes benchmarks/results/ranks.json.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.ranks.contestants import actor_of, job_of, parts_of, uneven_rows
from benchmarks.ranks.orders import measure
from rolemesh.models.tiny import make_tiny_model

RESULTS = Path(__file__).parents[1] / "results" / "ranks.json"
ROWS = 32
MICRO = 4
LENGTHS = (32, 96)
UPDATED = {"hidden_size": 128, "num_layers": 4, "num_heads": 4}
PUBLISHED = {"hidden_size": 1024, "num_layers": 4, "num_heads": 8}  # 253 MiB


def updates(directory: Path, rounds: int) -> dict[str, Any]:
    """An update of the same mini-batch: one rank of two threads, two ranks of one, verl's scheme."""
    model = make_tiny_model(directory / "model", **UPDATED)  # type: ignore[arg-type]
    rows = uneven_rows(ROWS, LENGTHS)
    jobs = [job_of(model, directory, ROWS, MICRO, LENGTHS, ranks) for ranks in (1, 2)]
    seconds: dict[str, list[float]] = {"one rank": [], "two ranks": [], "verl's scheme": []}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}
    norms: dict[str, float] = {}
    parts: list[dict[str, float]] = []
    with actor_of(1, jobs[0], rows, 2) as one, actor_of(2, jobs[1], rows, 1) as two:
        for number in range(rounds + 1):
            for name, turn, what in (
                ("one rank", one, "update"),
                ("two ranks", two, "update"),
                ("verl's scheme", two, "verl"),
            ):
                figures = turn(what)
                norms.setdefault(name, figures["grad_norm"])
                if number:  # the first turn warms up
                    seconds[name].append(figures["seconds"])
                    cpu[name].append(figures["cpu"])
            figures = two("learn")
            commands = two("commands")
            sent = two("rows")
            one("update")  # both have made as many steps
            if number:
                parts.append(parts_of(figures["ranks"], commands["seconds"], sent["seconds"]))
    assert abs(norms["one rank"] / norms["two ranks"] - 1) < 1e-4, f"two ranks made another step: {norms}"
    lengths = rows["attention_mask"].sum(1)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "ratio_to_one_rank": ratios(seconds["two ranks"], seconds["one rank"]),
        "ratio_to_verl": ratios(seconds["two ranks"], seconds["verl's scheme"]),
        "ratio_of_cpu_to_one_rank": ratios(cpu["two ranks"], cpu["one rank"]),
        "ratio_of_cpu_to_verl": ratios(cpu["two ranks"], cpu["verl's scheme"]),
        "first_grad_norm": norms,
        "share_of_padding": 1 - float(lengths.sum()) / rows["attention_mask"].numel(),
        "parts": {name: statistics.median(each[name] for each in parts) for name in parts[0]},
    }


def publishing(directory: Path, rounds: int) -> dict[str, Any]:
    """Publishing a version of 241 MiB from one rank, from two, and from two on two machines, interleaved."""
    model = make_tiny_model(directory / "model", **PUBLISHED)  # type: ignore[arg-type]
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    rows = uneven_rows(2, LENGTHS)
    jobs = [job_of(model, directory, 2, 2, LENGTHS, ranks) for ranks in (1, 2)]
    seconds: dict[str, list[float]] = {"one rank": [], "two ranks": [], "two machines": []}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}
    with (
        actor_of(1, jobs[0], rows, 2) as one,
        actor_of(2, jobs[1], rows, 1) as two,
        actor_of(2, jobs[1], rows, 1, on_machines=True) as apart,
    ):
        for version in range(1, rounds + 2):
            for name, turn in (("one rank", one), ("two ranks", two), ("two machines", apart)):
                figures = turn("publish", version)
                if version > 1:
                    seconds[name].append(figures["seconds"])
                    cpu[name].append(figures["cpu"])
    return {
        "bytes": num_bytes,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "ratio_to_one_rank": ratios(seconds["two ranks"], seconds["one rank"]),
        "ratio_of_cpu_to_one_rank": ratios(cpu["two ranks"], cpu["one rank"]),
        "ratio_of_machines_to_ranks": ratios(seconds["two machines"], seconds["two ranks"]),
    }


def ratios(mine: list[float], other: list[float]) -> dict[str, float]:
    """The ratio of the minima, and the median of the rounds' ratios."""
    by_round = [a / b for a, b in zip(mine, other, strict=True)]
    return {"of_minima": min(mine) / min(other), "median": statistics.median(by_round)}


def show(found: dict[str, Any]) -> None:
    console = Console()
    orders = Table("an empty command", "p50, ms")
    for name, milliseconds in found["orders_ms"].items():
        orders.add_row(name, f"{milliseconds:.2f}")
    console.print(orders)
    for title in ("update", "publishing"):
        table = Table(title, "minimum s", "median s")
        for kind in ("seconds", "cpu_seconds"):
            for name, values in found[title][kind].items():
                label = f"{name}, processors" if kind == "cpu_seconds" else name
                table.add_row(label, f"{min(values):.3f}", f"{statistics.median(values):.3f}")
        for name, ratio in found[title].items():
            if name.startswith("ratio"):
                table.add_row(name, f"{ratio['of_minima']:.2f}", f"{ratio['median']:.2f}")
        console.print(table)
    parts = Table("an update on two ranks, by part", "ms")
    for name, seconds in found["update"]["parts"].items():
        parts.add_row(name, f"{1000 * seconds:.1f}")
    console.print(parts)


def main(
    rounds: Annotated[int, typer.Option(help="Turns of each contestant, interleaved.")] = 9,
    number: Annotated[int, typer.Option(help="Empty commands in a round.")] = 500,
) -> None:
    """Print and write seconds, ratios and parts."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"orders_ms": asyncio.run(measure(number, 3))}
    with TemporaryDirectory() as folder:
        found["update"] = updates(Path(folder) / "update", rounds)
        found["publishing"] = publishing(Path(folder) / "publish", rounds)
    show(found)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
