"""Conversations with a slow tool: our controller, rollout and environment beside TRL's GRPOTrainer.

    python -m benchmarks.agents_beside_trl

Contestants are processes that get the same model, prompts and tool, and take turns, a generation phase each.
TRL has the environment of benchmarks/step, under .cache/benchmarks. Writes benchmarks/results/agents-trl.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from contextlib import AsyncExitStack
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.agents_beside_trl.setting import CONVERSATIONS, WAITS
from benchmarks.agents_beside_trl.workload import write_workload
from benchmarks.step.contestants import CACHE, ROOT, Contestant, interpreter

RESULT = ROOT / "benchmarks" / "results" / "agents-trl.json"
WORKLOAD = CACHE / "agents-workload"
HERE = "benchmarks.agents_beside_trl"
OURS = "ours"
TRL = "TRL"
CONTINUOUS = "TRL, continuous batching"
RATES = ("turns", "tokens")

console = Console(width=None if sys.stdout.isatty() else 140)


async def compete(wait_s: float, rounds: int) -> dict[str, Any]:
    """Let each contestant hold its conversations in turns, `rounds` times after a first one."""
    theirs = interpreter("grpo")
    given = [str(WORKLOAD), str(wait_s)]
    lines = {
        OURS: (sys.executable, [f"{HERE}.ours", *given]),
        TRL: (theirs, [f"{HERE}.with_trl", *given]),
        CONTINUOUS: (theirs, [f"{HERE}.with_trl", *given, "--continuous"]),
    }
    async with AsyncExitStack() as stack:
        contestants = []
        versions = {}
        for name, (python, arguments) in lines.items():
            contestant = await Contestant.start(name, python, arguments)
            stack.push_async_callback(contestant.end)
            versions[name] = (await contestant.answer())["versions"]
            contestants.append(contestant)
        for round in range(rounds + 1):
            for contestant in contestants if round % 2 else reversed(contestants):
                phase = await contestant.step()
                assert phase["conversations"] == CONVERSATIONS, phase
                if round:
                    contestant.steps.append(phase)
            console.print(f"tools of up to {wait_s:g} s: round {round} of {rounds}", style="dim")
        return {each.name: numbers(each.steps) | {"versions": versions[each.name]} for each in contestants}


def numbers(phases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what each round took and made, and how much of it a second."""
    found = {name: [phase[name] for phase in phases] for name in ("seconds", "turns", "calls", "tokens")}
    for rate in RATES:
        found[f"{rate}_per_second"] = [phase[rate] / phase["seconds"] for phase in phases]
    return found


def ratio(ours: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """Return the median of the rounds' ratios: in a round both were measured soon after each other."""
    return float(statistics.median(a / b for a, b in zip(ours[key], other[key], strict=True)))


def show(cases: dict[str, Any]) -> None:
    table = Table(title=f"{CONVERSATIONS} conversations")
    for heading in (
        "",
        "",
        "minimum s",
        "median s",
        "turns",
        "turns/s",
        "tokens/s",
        "ours: turns/s over it",
        "tokens/s",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    for case, of in cases.items():
        for name, found in of.items():
            middle = {key: statistics.median(found[key]) for key in found if key != "versions"}
            table.add_row(
                case,
                name,
                f"{min(found['seconds']):.1f}",
                f"{middle['seconds']:.1f}",
                f"{middle['turns']:.0f}",
                *(f"{middle[f'{rate}_per_second']:.1f}" for rate in RATES),
                *(f"{ratio(of[OURS], found, f'{rate}_per_second'):.1f}" for rate in RATES),
            )
            case = ""
    console.print(table)


async def measure(rounds: int) -> dict[str, Any]:
    return {case: await compete(wait_s, rounds) for case, wait_s in WAITS.items()}


def main(rounds: Annotated[int, typer.Option(help="Rounds after a first one.")] = 3) -> None:
    """Print a table, and write benchmarks/results/agents-trl.json."""
    write_workload(WORKLOAD)
    result: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    result["cases"] = asyncio.run(measure(rounds))
    result["load_after"] = os.getloadavg()[0]
    show(result["cases"])
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
