"""How ten recipes learn: the demo's task by each, as many rows a step for all, over several seeds.

    python -m benchmarks.recipes

Each run has a directory under outputs/recipes and goes on from its last checkpoint; one that is finished is not
made again. `rm -r outputs/recipes` begins anew.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

from rolemesh.config import JobConfig, load_job
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Roles
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.command_line.demo import one_thread, prepare_demo
from rolemesh.services.controller.record import STEP
from rolemesh.services.controller.run.loop import Run
from rolemesh.services.controller.run.run_dir import read_metrics
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.services.rollout.worker import RolloutWorker

ROOT = Path(__file__).parents[1]
RUNS = Path("outputs/recipes")
ACCURACY = "val-core/rolemesh/arithmetic/acc/mean@1"
RECIPES = ("ppo", "reinforce++", "remax", "rloo", "grpo", "dr-grpo", "dapo", "gspo", "cispo", "gpg")
NUM_ROWS = 128  # responses a step, whatever rollout.n
BLUE = "#2563eb"
GREY = "#d1d5db"
WORKERS: dict[str, Any] = {
    "actor": ActorWorker,
    "rollout": RolloutWorker,
    "reward": RewardWorker,
    "critic": CriticWorker,
    "reference": ReferenceWorker,
}

Curves = dict[str, dict[str, dict[int, float]]]  # recipe, seed, step: held-out accuracy


def job_of(recipe: str, seed: int, steps: int) -> JobConfig:
    """The demo's job with this recipe laid on it: NUM_ROWS responses, two optimizer steps of half of them."""
    files = [str(ROOT / "configs" / "recipes" / f"{recipe}.yaml")]
    room = ["data.max_response_length=12", "reward.overlong_buffer.len=3"]  # no right sum is overlong
    num_prompts = NUM_ROWS // load_job(ROOT / "configs" / "tiny.yaml", files + room).rollout.n
    seeds = [f"{section}.seed={seed}" for section in ("data", "actor", "critic", "rollout")]
    return load_job(
        ROOT / "configs" / "tiny.yaml",
        [
            *files, *room, *seeds,
            f"actor.model.path={RUNS / 'model'}",
            f"data.train_files={RUNS / 'data' / 'train.parquet'}",
            f"data.val_files={RUNS / 'data' / 'val.parquet'}",
            f"data.train_batch_size={num_prompts}",
            f"actor.ppo_mini_batch_size={num_prompts // 2}",
            "actor.optim.lr=5e-4",
            f"trainer.experiment_name={recipe}-{seed}",
            f"trainer.default_local_dir={RUNS / f'{recipe}-{seed}'}",
            f"trainer.total_training_steps={steps}", "trainer.test_freq=2",
            "trainer.rollout_data_dir=null", "trainer.validation_data_dir=null",
        ],
    )  # fmt: skip


def make_run(job: JobConfig) -> None:
    """The rest of the run, with its roles in this process."""
    if Run(job, load_tokenizer(job.actor.model)).finished():
        return
    made = {role: WORKERS[role](job) for role in job.roles}
    try:
        asyncio.run(Run(job, load_tokenizer(job.actor.model)).train(Roles.of(job, made)))
    finally:
        for worker in made.values():
            worker.close()


def draw(curves: Curves, path: Path) -> None:
    """A panel for each recipe: its seeds and their mean, before the means of all others."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    means = {recipe: _mean(list(seeds.values())) for recipe, seeds in curves.items()}
    columns = min(5, len(curves))
    figure, grid = pyplot.subplots(
        -(-len(curves) // columns), columns, figsize=(2.3 * columns, 2.4 * -(-len(curves) // columns) + 0.6),
        sharex=True, sharey=True, squeeze=False, layout="constrained",
    )  # fmt: skip
    for axes in grid.flat[len(curves) :]:
        axes.remove()
    for axes, (recipe, seeds) in zip(grid.flat, curves.items(), strict=False):
        for mean in means.values():
            axes.plot(*_points(mean), color=GREY, linewidth=0.9)
        for curve in seeds.values():
            axes.plot(*_points(curve), color=BLUE, linewidth=0.8, alpha=0.4)
        steps, accuracies = _points(means[recipe])
        axes.plot(steps, accuracies, color=BLUE, linewidth=2.2)
        axes.set_title(recipe, loc="left", fontsize=11, fontweight="bold")
        axes.text(0.97, 0.05, f"{accuracies[-1]:.0%}", transform=axes.transAxes, ha="right", color=BLUE)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("held-out problems right (greedy)", fontsize=10)
    figure.suptitle(
        f"Two-digit additions, {NUM_ROWS} responses a step. Blue: the recipe, its seeds and their mean; "
        "grey: the others",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _mean(seeds: list[dict[int, float]]) -> dict[int, float]:
    """Over the seeds, at the steps that all of them have."""
    shared = sorted(set.intersection(*(set(seed) for seed in seeds)))
    return {step: sum(seed[step] for seed in seeds) / len(seeds) for step in shared}


def _points(curve: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def accuracy(job: JobConfig) -> dict[int, float]:
    """Held-out accuracy by step."""
    records = read_metrics(job.run_dir / "metrics.jsonl")
    return {int(r[STEP] or 0): right for r in records if (right := r.get(ACCURACY)) is not None}


def keep(curves: Curves) -> None:
    """What is known so far, after each run: all of them take a while."""
    results = {"rows_per_step": NUM_ROWS, "accuracy": curves}
    (ROOT / "benchmarks" / "results" / "recipes.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(curves, ROOT / "docs" / "algorithms.png")


def main(
    seeds: Annotated[list[int], typer.Option(help="Which seeds.")] = [1, 2, 3],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Of each run.")] = 30,
    recipes: Annotated[list[str], typer.Option(help="Files of configs/recipes.")] = list(RECIPES),  # noqa: B006
) -> None:
    """Prints a table, and writes benchmarks/results/recipes.json and docs/algorithms.png."""
    console = Console()
    curves: Curves = {}
    with one_thread():
        prepare_demo(RUNS)
        for seed in seeds:
            for recipe in recipes:
                console.print(f"[bold]{recipe}[/], seed {seed}")
                job = job_of(recipe, seed, steps)
                make_run(job)
                curves.setdefault(recipe, {})[str(seed)] = accuracy(job)
                keep(curves)
    table = Table(title=f"held-out accuracy after {steps} steps")
    for heading in ("recipe", "before", "after, mean", "least", "greatest"):
        table.add_column(heading, justify="right")
    for recipe, by_seed in curves.items():
        before, last = ([list(curve.values())[at] for curve in by_seed.values()] for at in (0, -1))
        numbers = (before[0], sum(last) / len(last), min(last), max(last))
        table.add_row(recipe, *(f"{number:.3f}" for number in numbers))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
