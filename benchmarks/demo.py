"""Do the demos learn, whatever the seed? The whole of a demo for each of three seeds: the warm-started model's
accuracy on held-out problems, then that after training; with tools also the calls that did not fail.

    python -m benchmarks.demo
    python -m benchmarks.demo --task tools
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SEEDS = [1, 2, 3]
CONFIGS = {"sums": ROOT / "configs" / "tiny.yaml", "tools": ROOT / "configs" / "tiny-tools.yaml"}
SEEDED = {"sums": ("data", "actor", "critic", "rollout"), "tools": ("data", "actor", "rollout")}
FILES = {"sums": "demo", "tools": "demo-tools"}  # of the results
CALLS = "conversation/tool_calls/mean"
ERRORS = "conversation/tool_errors/mean"


def one_seed(task: str, seed: int, directory: Path) -> dict[str, Any]:
    """Makes model, demonstrations, problems and run with this seed; accuracy and calls by step."""
    began = time.perf_counter()
    _rolemesh("demo", str(directory), "--task", task, "--seed", str(seed))
    warm_started = time.perf_counter()
    seeds = [f"{section}.seed={seed}" for section in SEEDED[task]]
    paths = {
        "actor.model.path": "model",
        "data.train_files": "data/train.parquet",
        "data.val_files": "data/val.parquet",
        "trainer.default_local_dir": "run",
        "trainer.rollout_data_dir": "run/rollouts",
        "trainer.validation_data_dir": "run/validation",
    }
    places = [f"{key}={directory / path}" for key, path in paths.items()]
    _rolemesh("run", str(CONFIGS[task]), *seeds, *places)
    records = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "accuracy": {r["training/global_step"]: value for r in records for value in _accuracies(r)},
        "good_calls": {r["training/global_step"]: r[CALLS] - r[ERRORS] for r in records if CALLS in r},
        "warm_start_s": warm_started - began,
        "training_s": time.perf_counter() - warm_started,
    }


def _accuracies(record: dict[str, Any]) -> list[float]:
    return [v for name, v in record.items() if name.startswith("val-core/") and name.endswith("/acc/mean@1")]


def _rolemesh(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rolemesh", *arguments], check=True, cwd=ROOT)


def draw(results: list[dict[str, Any]], title: str, path: Path) -> None:
    """Accuracy over steps, a line for each seed; dotted: calls of tools that did not fail."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for result in results:
        steps, accuracies = zip(*result["accuracy"].items(), strict=True)
        (line,) = axes.plot(steps, accuracies, marker="o", markersize=3, label=f"seed {result['seed']}")
        if result["good_calls"]:
            label = "calls a row that did not fail" if result is results[0] else None
            axes.plot(
                *zip(*result["good_calls"].items(), strict=True), ":", color=line.get_color(), label=label
            )
    axes.set(xlabel="step", ylabel="held-out problems right (greedy)", ylim=(0, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(task: Annotated[str, typer.Option(help="sums or tools")] = "sums") -> None:
    """Prints a table, and writes benchmarks/results/demo.json and demo.png: of all seeds, or nothing."""
    title = {"sums": "The demo", "tools": "The demo with tools"}[task]
    table = Table(title=f"{title}: held-out accuracy")
    for heading in ("seed", "before", "after", "warm-start s", "training s"):
        table.add_column(heading, justify="right")
    results = []
    for seed in SEEDS:
        with TemporaryDirectory() as directory:
            results.append(result := one_seed(task, seed, Path(directory)))
        before, *_, after = result["accuracy"].values()
        seconds = (f"{result['warm_start_s']:.0f}", f"{result['training_s']:.0f}")
        table.add_row(str(seed), f"{before:.3f}", f"{after:.3f}", *seconds)
    Console().print(table)
    kept = ROOT / "benchmarks" / "results"
    kept.mkdir(exist_ok=True)
    (kept / f"{FILES[task]}.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(results, title, kept / f"{FILES[task]}.png")


if __name__ == "__main__":
    typer.run(main)
