"""What it costs that the roles are services: the demo's steps over gRPC, five processes, beside the same steps
in one process. Interleaved; the bits of both are compared as well.

    python -m benchmarks.steps
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.algos.kl import KLController
from rolemesh.config import JobConfig, load_job
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Metrics, Roles
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.command_line.demo import prepare_demo
from rolemesh.services.controller.pages.choice import page_of
from rolemesh.services.controller.pages.step import Step
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.services.processes.role_processes import role_processes
from rolemesh.services.reward.worker import RewardWorker
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.wire.allocator import tune

ROOT = Path(__file__).parents[1]
DEMO = Path("outputs/tiny")

OneStep = Callable[[int], Awaitable[Metrics]]


def stepper(job: JobConfig, roles: Roles) -> OneStep:
    """Makes step `number` of the job with these roles."""
    data = PromptDataset(job.data.train_files, job.data, load_tokenizer(job.actor.model))
    order = PromptOrder(len(data), job.data)
    kl = KLController(job.algorithm.kl_ctrl)
    page = page_of(job)

    async def one_step(number: int) -> Metrics:
        return await page(data.batch(order.rows(number)), roles, Step(number, job, kl))

    return one_step


async def measure(rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step, of each contestant, a value for each round of `steps` steps."""
    prepare_demo(DEMO)
    seconds: dict[str, list[float]] = {"one process": [], "five processes over gRPC": []}
    with TemporaryDirectory() as directory:
        job = load_job(ROOT / "configs" / "tiny.yaml", [f"trainer.default_local_dir={directory}"])
        async with AsyncExitStack() as stack:
            processes = await stack.enter_async_context(role_processes(job))
            addresses = await processes.addresses(job.trainer.ready_timeout_s)
            clients = {
                role: await stack.enter_async_context(new_client(role, addresses[role], job))
                for role in job.roles
            }
            await until_ready(clients.values(), job.trainer.ready_timeout_s)
            in_process = Roles(
                ActorWorker(job), RolloutWorker(job), RewardWorker(job), CriticWorker(job), ReferenceWorker(job)
            )
            contestants = {
                "one process": stepper(job, in_process),
                "five processes over gRPC": stepper(job, Roles(**clients)),  # type: ignore[arg-type]
            }
            for number in range(1, 3):  # warm up
                for one_step in contestants.values():
                    await one_step(number)
            for round in range(rounds):
                ends: list[Metrics] = []
                for name, one_step in contestants.items():
                    began = time.perf_counter()
                    for number in range(3 + round * steps, 3 + (round + 1) * steps):
                        metrics = await one_step(number)
                    seconds[name].append((time.perf_counter() - began) / steps)
                    ends.append(metrics)
                assert ends[0] == ends[1], "the two did not make the same steps"
    return seconds


def main(
    rounds: Annotated[int, typer.Option(help="How often each contestant has its turn.")] = 7,
    steps: Annotated[int, typer.Option(help="Steps in a turn.")] = 5,
) -> None:
    """Prints seconds a step and the ratio, and writes benchmarks/results/steps.json."""
    tune()
    seconds = asyncio.run(measure(rounds, steps))
    local, remote = seconds.values()
    ratios = [there / here for here, there in zip(local, remote, strict=True)]
    table = Table(title=f"the demo's steps, {rounds} rounds of {steps}")
    for heading in ("", "minimum s", "median s"):
        table.add_column(heading)
    for name, values in seconds.items():
        table.add_row(name, f"{min(values):.3f}", f"{statistics.median(values):.3f}")
    table.add_row(
        "ratio (aim: at most 1.10)", f"{min(remote) / min(local):.2f}", f"{statistics.median(ratios):.2f}"
    )
    Console().print(table)
    result = {
        "seconds_per_step": seconds,
        "ratio_of_minima": min(remote) / min(local),
        "median_ratio": statistics.median(ratios),
    }
    path = ROOT / "benchmarks" / "results" / "steps.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
