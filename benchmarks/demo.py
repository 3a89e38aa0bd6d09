"""Does the demo learn, whatever the seed? The whole of `make run` for each of three seeds: the warm-started
model's accuracy on held-out problems, then PPO's.

    python -m benchmarks.demo
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SEEDS = [1, 2, 3]
ACCURACY = "val-core/rolemesh/arithmetic/acc/mean@1"


def one_seed(seed: int, directory: Path) -> dict[str, Any]:
    """Makes model, demonstrations, problems and run with this seed; accuracy by step."""
    began = time.perf_counter()
    _rolemesh("demo", str(directory), "--seed", str(seed))
    warm_started = time.perf_counter()
    seeds = [f"{section}.seed={seed}" for section in ("data", "actor", "critic", "rollout")]
    paths = {
        "actor.model.path": "model",
        "data.train_files": "data/train.parquet",
        "data.val_files": "data/val.parquet",
        "trainer.default_local_dir": "run",
        "trainer.rollout_data_dir": "run/rollouts",
        "trainer.validation_data_dir": "run/validation",
    }
    places = [f"{key}={directory / path}" for key, path in paths.items()]
    _rolemesh("run", str(ROOT / "configs" / "tiny.yaml"), *seeds, *places)
    records = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "accuracy": {r["training/global_step"]: r[ACCURACY] for r in records if ACCURACY in r},
        "warm_start_s": warm_started - began,
        "ppo_s": time.perf_counter() - warm_started,
    }


def _rolemesh(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "rolemesh", *arguments], check=True, cwd=ROOT)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over steps, a line for each seed."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for result in results:
        steps, accuracies = zip(*result["accuracy"].items(), strict=True)
        axes.plot(steps, accuracies, marker="o", markersize=3, label=f"seed {result['seed']}")
    axes.set(xlabel="PPO step", ylabel="held-out problems right (greedy)", ylim=(0, 1), title="The demo")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Prints a table, and writes benchmarks/results/demo.json and demo.png: of all seeds, or nothing."""
    table = Table(title="held-out accuracy of the demo")
    for heading in ("seed", "before", "after", "warm-start s", "PPO s"):
        table.add_column(heading, justify="right")
    results = []
    for seed in SEEDS:
        with TemporaryDirectory() as directory:
            results.append(result := one_seed(seed, Path(directory)))
        before, *_, after = result["accuracy"].values()
        seconds = (f"{result['warm_start_s']:.0f}", f"{result['ppo_s']:.0f}")
        table.add_row(str(seed), f"{before:.3f}", f"{after:.3f}", *seconds)
    Console().print(table)
    kept = ROOT / "benchmarks" / "results"
    kept.mkdir(exist_ok=True)
    (kept / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
    draw(results, kept / "demo.png")


if __name__ == "__main__":
    typer.run(main)
