"""How a pretrained model learns: SmolLM2-135M-Instruct by examples/smollm2, over several seeds, beside TRL.

    python -m benchmarks.real
    python -m benchmarks.real --trl

Each run has a directory under outputs/real. One of ours that was interrupted goes on from its last checkpoint,
and a finished one is not made again. `rm -r outputs/real` begins anew.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.real import beside_trl, ours
from benchmarks.real.model import make_model_and_data
from benchmarks.step.contestants import ROOT
from rolemesh.cpus import usable_cpus

RESULTS = ROOT / "benchmarks" / "results" / "real.json"
PICTURE = ROOT / "docs" / "curves.png"
BLUE = "#2563eb"
ORANGE = "#ea580c"
GREY = "#6b7280"

Result = dict[str, Any]
Curve = dict[int, float]


def draw(results: dict[str, list[Result]]) -> None:
    """Held-out accuracy: thin lines are seeds, thick ones their mean; dots are single steps."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    seeds = results["rolemesh"]
    group = ours.job_of(seeds[0]["seed"])[0].rollout.n
    for result in seeds:
        axes.plot(*_points(result["greedy"]), color=BLUE, linewidth=0.9, alpha=0.45)
        axes.plot(*_points(result["sampled"]), ".", color=ORANGE, markersize=4, alpha=0.35)
    of_ours = [_mean([result[kind] for result in seeds]) for kind in ("greedy", "sampled")]
    axes.plot(*_points(of_ours[0]), color=BLUE, linewidth=2.4, marker="o", markersize=4, label="greedy")
    axes.plot(*_points(of_ours[1]), color=ORANGE, linewidth=1.6, label=f"sampled, mean of {group} answers")
    if len(beside := results.get("TRL", [])) == len(seeds):
        sampled = _mean([result["sampled"] for result in beside])
        axes.plot(*_points(sampled), color=GREY, linewidth=1.6, label="TRL, sampled")
    axes.set(xlabel="step", ylabel="held-out questions right", ylim=(0, 1.02), xlim=(0, None))
    title = "SmolLM2-135M-Instruct learns which of two numbers is larger"
    axes.set_title(f"{title} (GRPO, {len(seeds)} seeds)", fontsize=11)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(PICTURE, dpi=130)
    pyplot.close(figure)


def _mean(seeds: list[Curve]) -> Curve:
    """Over the seeds, at the steps that all of them have."""
    shared = sorted(set.intersection(*(set(seed) for seed in seeds)))
    return {step: sum(seed[step] for seed in seeds) / len(seeds) for step in shared}


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def keep(results: dict[str, list[Result]]) -> None:
    """Write what is known so far, after each run."""
    seconds = sum(sum(result["seconds"].values()) for runs in results.values() for result in runs)
    content = {
        "model": "SmolLM2-135M-Instruct",
        "job": "examples/smollm2/job.yaml",
        "cores": usable_cpus(),
        "versions": {name: version(name) for name in ("rolemesh", "torch", "transformers")},
        "core_hours_of_steps": seconds * usable_cpus() / 3600,
        "seconds_over_trl": seconds_over_trl(results),
        **results,
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    draw(results)


def show(results: dict[str, list[Result]]) -> None:
    table = Table("", "seed", "greedy: first", "last", "sampled: first", "last", "seconds a step")
    for name, runs in results.items():
        for result in runs:
            greedy, sampled, seconds = (
                list(result[kind].values()) for kind in ("greedy", "sampled", "seconds")
            )
            numbers = (greedy[0], greedy[-1], sampled[0], sampled[-1])
            a_step = f"{sum(seconds) / len(seconds):.1f}"
            table.add_row(name, str(result["seed"]), *(f"{number:.3f}" for number in numbers), a_step)
    Console().print(table)
    if ratios := seconds_over_trl(results):
        Console().print("seconds of ours over TRL's, seed by seed:", *(f"{ratio:.2f}" for ratio in ratios))


def seconds_over_trl(results: dict[str, list[Result]]) -> list[float]:
    """Return our seconds over TRL's for each seed, over the steps that TRL made."""
    return [
        sum(own["seconds"][step] for step in trl["seconds"]) / sum(trl["seconds"].values())
        for own, trl in zip(results["rolemesh"], results.get("TRL", []), strict=False)
    ]


def show_shares(runs: list[Result]) -> None:
    phases = runs[0]["share_of_peak"]
    table = Table("", *phases, title="share of the machine's float32 matrix products")
    for run in runs:
        table.add_row(f"seed {run['seed']}", *(f"{share:.2f}" for share in run["share_of_peak"].values()))
    Console().print(table)


def main(
    seeds: Annotated[list[int], typer.Option(help="Which seeds.")] = [1, 2, 3],  # noqa: B006
    trl: Annotated[bool, typer.Option("--trl", help="Train by TRL as well, in turns.")] = False,
) -> None:
    """Prints a table, and writes benchmarks/results/real.json and docs/curves.png."""
    make_model_and_data()
    results: dict[str, list[Result]] = {}
    contestants = {"rolemesh": ours.train} | ({"TRL": beside_trl.train} if trl else {})
    for seed in seeds:
        for name, train in contestants.items():
            results.setdefault(name, []).append(train(seed))
            keep(results)
    show(results)
    show_shares(results["rolemesh"])


if __name__ == "__main__":
    typer.run(main)
