"""What the planner expects of an actor on 8, 64 and 512 GPUs: where its time goes, and what breaks first.

python -m benchmarks.planner.scaling
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.planner.cost import elapsed, role_parts
from rolemesh.planner.device_specs import GPUS, Device, human_size
from rolemesh.planner.memory import role_memory
from rolemesh.planner.shapes import ModelShape

RESULTS = Path(__file__).parents[1] / "results"

# https://arxiv.org/abs/2412.15115 and https://arxiv.org/abs/2407.21783: hidden, layers, heads, key-value heads,
# intermediate, vocabulary
SHAPES = {
    "7B": (3584, 28, 28, 4, 18944, 152064),
    "32B": (5120, 64, 40, 8, 27648, 152064),
    "70B": (8192, 80, 64, 8, 28672, 128256),
}
# Ranks, and how they are spread.
SPREADS: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (8, "", {}),
    (64, "", {}),
    (64, "Ulysses 8", {"ulysses_sequence_parallel_size": 8}),
    (512, "", {}),
    (512, "copies of 64", {"fsdp_config": {"fsdp_size": 64}}),
)
PARTS = ("compute", "gathers", "sums", "exchanges", "optimizer", "orders")


def shape_of(numbers: tuple[int, ...]) -> ModelShape:
    hidden, layers, heads, kv_heads, intermediate, vocabulary = numbers
    head_dim = 128
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    multiplied = layers * (attention + 3 * hidden * intermediate)
    body = multiplied + hidden * (2 * layers + 1 + vocabulary)
    return ModelShape(
        body,
        hidden * vocabulary,
        multiplied,
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim,
        intermediate,
        vocabulary,
    )


def job_of_many(ranks: int, keys: Mapping[str, Any]) -> JobConfig:
    """GRPO of 512 prompts with 8 answers, 1,024 and 3,072 tokens, and four updates a step."""
    actor: dict[str, Any] = {
        "model": {"path": "/models/any", "dtype": "bfloat16"},
        "ppo_mini_batch_size": 128,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": 16384,
    }
    return make_job(
        {
            "algorithm": {"adv_estimator": "grpo"},
            "data": {"train_batch_size": 512, "max_prompt_length": 1024, "max_response_length": 3072},
            "actor": actor | dict(keys),
            "rollout": {"n": 8, "name": "vllm", "dtype": "bfloat16"},
            "placement": {"ranks": {"actor": ranks}},
        }
    )


def simulate(device: Device) -> list[dict[str, Any]]:
    """What the planner expects of an actor's update by model, ranks and spread."""
    cases = []
    for name, numbers in SHAPES.items():
        shape = shape_of(numbers)
        for ranks, spread, keys in SPREADS:
            job = job_of_many(ranks, keys)
            rows = job.data.train_batch_size * job.rollout.n
            parts = role_parts(job, "actor", shape, device, ranks, rows)["update"]
            memory = role_memory(job, "actor", {"actor": shape}, device, ranks)
            seconds = elapsed(parts, device)
            width = job.data.max_prompt_length + job.data.max_response_length
            tokens = rows * width / seconds / ranks
            pairs = 4 * width * shape.heads * shape.head_dim * shape.layers
            head = 2 * shape.hidden * shape.vocabulary * (job.data.max_response_length + 1) / width
            useful = 3 * (2 * shape.multiplied_parameters + pairs + head)
            cases.append(
                {
                    "model": name,
                    "ranks": ranks,
                    "spread": spread,
                    "memory": asdict(memory),
                    "fits": memory.total <= device.memory_bytes,
                    "seconds": seconds,
                    "parts": parts,
                    "tokens_per_second_and_gpu": tokens,
                    # Of the data sheet's rate, twice what the planner assumes; recomputation is not useful.
                    "mfu": tokens * useful / (2 * device.flops["bfloat16"]),
                }
            )
    return cases


# -------------------------------------------------------------------------------------- output


def show_many(cases: list[dict[str, Any]]) -> None:
    table = Table(title="the actor's update on H100s of 80 GiB, by the planner: seconds by part")
    for heading in ("model", "ranks", "spread", "memory", *PARTS, "in all", "tokens/s/GPU", "MFU"):
        table.add_column(heading, justify="left" if heading in ("model", "spread") else "right")
    for case in cases:
        size = human_size(sum(case["memory"].values()))
        table.add_row(
            case["model"],
            str(case["ranks"]),
            case["spread"],
            size if case["fits"] else f"[red]{size}[/]",
            *(f"{case['parts'][part]:.1f}" for part in PARTS),
            f"{case['seconds']:.1f}",
            f"{case['tokens_per_second_and_gpu']:.0f}",
            f"{case['mfu']:.2f}",
        )
    Console().print(table)


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    """GPU seconds by part: a bar that is as high on more GPUs has lost nothing."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(1, len(SHAPES), figsize=(14, 4.2), sharey=False)
    for axes, model in zip(panes, SHAPES, strict=True):
        of_model = [case for case in cases if case["model"] == model]
        labels = [f"{case['ranks']}\n{case['spread']}" for case in of_model]
        floor = [0.0] * len(of_model)
        for part in PARTS:
            heights = [case["parts"][part] * case["ranks"] / 3600 for case in of_model]
            axes.bar(labels, heights, bottom=floor, label=part)
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
        axes.set_title(model)
        axes.set_xlabel("ranks")
    panes[0].set_ylabel("GPU hours of an update")
    panes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    """Print a table, and write benchmarks/results/scaling.json and scaling.png."""
    simulated = simulate(GPUS["h100"])
    show_many(simulated)
    (RESULTS / "scaling.json").write_text(json.dumps(simulated, indent=2) + "\n")
    draw(simulated, RESULTS / "scaling.png")


if __name__ == "__main__":
    typer.run(main)
