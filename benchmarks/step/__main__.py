"""One step of GRPO and one of PPO on one machine: a page of ours beside the least that a loop by hand would do,
and beside TRL's trainers; packed training beside padded; the memory of log-probabilities.

    python -m benchmarks.step

Contestants are processes that are given the same model, prompts, rule and number of threads, and take turns.
Ours keeps freed memory, as every role does (rolemesh/wire/allocator.py).
TRL is installed into environments of its own under .cache/benchmarks. Writes benchmarks/results/step.json and
step.png.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.step.contestants import CACHE, ROOT, Contestant, interpreter
from benchmarks.step.setting import FILLS, RESPONSE_TOKENS, SEQUENCES
from benchmarks.step.workload import write_workload

RESULTS = ROOT / "benchmarks" / "results"
HERE = "benchmarks.step"
OURS = "ours"
NO_PASS = "ours, bypass_mode"
SERVED = "ours, five processes"
PLAIN = "by hand"
TRL = "TRL"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")
WARM_UP = 2  # steps

console = Console(width=None if sys.stdout.isatty() else 140)


async def compete(fill: str, algorithm: str, rounds: int, with_trl: bool) -> dict[str, Any]:
    """All contestants at one algorithm and fill: a step each, in turns, `rounds` times."""
    workload = str(CACHE / "workload" / fill)
    lines = {
        OURS: (sys.executable, [f"{HERE}.ours", workload, algorithm]),
        NO_PASS: (sys.executable, [f"{HERE}.ours", workload, algorithm, BYPASS]),
        SERVED: (sys.executable, [f"{HERE}.ours", workload, algorithm, "--served"]),
        PLAIN: (sys.executable, [f"{HERE}.plain", workload, algorithm]),
    }
    if with_trl:
        lines[TRL] = (interpreter(algorithm), [f"{HERE}.with_trl", workload, algorithm])
    async with AsyncExitStack() as stack:
        contestants = []
        threads = set()
        for name, (python, arguments) in lines.items():
            contestant = await Contestant.start(name, python, arguments)
            stack.push_async_callback(contestant.end)
            threads.add((await contestant.answer())["threads"])
            contestants.append(contestant)
        assert len(threads) == 1, f"contestants have different numbers of threads: {threads}"
        for round in range(-WARM_UP, rounds):
            for contestant in contestants if round % 2 else reversed(contestants):
                step = await contestant.step()
                if round >= 0:
                    contestant.steps.append(step)
            console.print(f"{algorithm}, {fill}: round {round + 1} of {rounds}", style="dim")
        return {contestant.name: numbers(contestant) for contestant in contestants}


def numbers(contestant: Contestant) -> dict[str, Any]:
    """What its steps took. Of five processes the one that is asked knows only its own processor seconds."""
    steps = contestant.steps
    made = sum(step["response_tokens"] for step in steps)
    found: dict[str, Any] = {
        "seconds": [step["seconds"] for step in steps],
        "fill": made / (len(steps) * SEQUENCES * RESPONSE_TOKENS),
        "response_tokens_per_second": made / sum(step["seconds"] for step in steps),
        "phases": {
            phase: statistics.median(step["phases"].get(phase, 0.0) for step in steps)
            for phase in steps[0]["phases"]
        },
    }
    if all("computing_s" in step for step in steps):
        shares = [1 - step["computing_s"] / step["seconds"] for step in steps]
        found["share_not_computing"] = statistics.median(shares)
    if contestant.name != SERVED:
        found["cpu_seconds"] = [step["cpu_s"] for step in steps]
    return found


async def packing(rounds: int) -> dict[str, Any]:
    """What benchmarks/step/packing.py finds."""
    workload = str(CACHE / "workload" / "full")
    arguments = [f"{HERE}.packing", workload, str(rounds)]
    contestant = await Contestant.start("packing", sys.executable, arguments)
    try:
        found = (await contestant.answer()) | (await contestant.answer())
        return {name: found[name] for name in ("training", "memory")}
    finally:
        await contestant.end()


def ratio(ours: dict[str, Any], other: dict[str, Any], key: str = "seconds") -> float:
    """The median of the rounds' ratios: in a round both were measured within seconds of each other."""
    return float(statistics.median(a / b for a, b in zip(ours[key], other[key], strict=True)))


def aims(result: dict[str, Any]) -> list[tuple[str, float, str]]:
    """(what, measured, aim)."""
    rows = []
    for case, of in result["steps"].items():
        rows.append((f"{case}: ours over the loop by hand", ratio(of[OURS], of[PLAIN]), "≤ 1.10"))
        rows.append((f"{case}: five processes of ours over the loop by hand", ratio(of[SERVED], of[PLAIN]), ""))
        rows.append((f"{case}: share not in model computation", of[OURS]["share_not_computing"], "≤ 0.05"))
        if TRL in of:
            aim = "< 1" if "full" in case else "≤ 0.6"
            rows.append((f"{case}: ours over TRL", ratio(of[OURS], of[TRL]), aim))
            rows.append((f"{case}: ours in bypass_mode over TRL", ratio(of[NO_PASS], of[TRL]), aim))
    training = result["training"]
    memory = result["memory"]
    packed, padded = ({"seconds": training["seconds"][name]} for name in ("packed", "padded"))
    rows.append((f"padded over packed training, {training['fill']:.0%} filled", ratio(padded, packed), "≥ 1.8"))
    peak = statistics.median(memory["peak_bytes"]) / memory["chunk_bytes"]
    rows.append(
        (
            f"log-probs over {memory['vocabulary']:,} tokens: peak of what is allocated over a chunk's logits",
            peak,
            "< 1.3",
        )
    )
    return rows


def show(result: dict[str, Any]) -> None:
    steps = Table("", "", "minimum s", "median s", "processor s", "answer tokens/s", "fill")
    phases = Table("seconds, at the same time in part", "", *PHASES)
    for case, of in result["steps"].items():
        for name, found in of.items():
            if found["phases"]:
                known = (found["phases"].get(phase) for phase in PHASES)
                phases.add_row(case, name, *("" if s is None else f"{s:.2f}" for s in known))
            seconds = found["seconds"]
            cpu = found.get("cpu_seconds")
            steps.add_row(
                case,
                name,
                f"{min(seconds):.2f}",
                f"{statistics.median(seconds):.2f}",
                f"{min(cpu):.2f}" if cpu else "",
                f"{found['response_tokens_per_second']:,.0f}",
                f"{found['fill']:.0%}",
            )
            case = ""
    console.print(steps)
    console.print(phases)
    table = Table("", "measured", "aim")
    for what, measured, aim in aims(result):
        table.add_row(what, f"{measured:.2f}", aim)
    console.print(table)


def draw(result: dict[str, Any], path: Path) -> None:
    """Median seconds of a step, a group of bars for each algorithm and fill."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(result["steps"]), figsize=(14, 3.2), squeeze=False)
    for panel, (case, of) in zip(panels[0], result["steps"].items(), strict=True):
        for at, (name, found) in enumerate(of.items()):
            panel.barh(name, statistics.median(found["seconds"]), color=f"C{at}")
            panel.scatter(found["seconds"], [name] * len(found["seconds"]), color="black", s=8, zorder=3)
        panel.set(title=case, xlabel="seconds a step (bar: median)", xlim=(0, None))
        panel.invert_yaxis()
        if panel is not panels[0][0]:
            panel.set_yticklabels([])
    figure.tight_layout()
    figure.savefig(path, dpi=120)


async def measure(rounds: int, with_trl: bool) -> dict[str, Any]:
    for fill, share in FILLS.items():
        write_workload(CACHE / "workload" / fill, share)
    if with_trl:
        for algorithm in ("grpo", "ppo"):
            interpreter(algorithm)
    found = await packing(rounds)
    steps = {}
    for fill in FILLS:
        for algorithm in ("grpo", "ppo"):
            case = f"{algorithm.upper()}, {fill} answers"
            steps[case] = await compete(fill, algorithm, rounds, with_trl)
    return {"steps": steps, **found}


def main(
    rounds: Annotated[int, typer.Option(help="How often each contestant has its turn, a step.")] = 5,
    with_trl: Annotated[bool, typer.Option("--trl/--no-trl", help="Whether TRL competes.")] = True,
) -> None:
    """Prints three tables, and writes benchmarks/results/step.json and step.png."""
    began = time.perf_counter()
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    result |= asyncio.run(measure(rounds, with_trl))
    result["load_after"] = os.getloadavg()[0]
    show(result)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "step.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(result, RESULTS / "step.png")
    console.print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    typer.run(main)
