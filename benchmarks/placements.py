"""What a placement costs: the demo's steps under each strategy, interleaved, and what a role's switch costs
beside a plain copy of the memory that it moves. The bits of all strategies are compared as well.

    python -m benchmarks.placements
"""

from __future__ import annotations

import asyncio
import json
import mmap
import statistics
import time
import urllib.request
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Any

import matplotlib
import torch
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.steps import DEMO, ROOT, OneStep, stepper
from rolemesh.config import load_job
from rolemesh.config.placement import strategies
from rolemesh.roles import Metrics, Roles
from rolemesh.services.command_line.demo import prepare_demo
from rolemesh.services.controller.role_clients import new_client, until_ready
from rolemesh.services.processes.role_processes import RoleProcesses, role_processes
from rolemesh.wire.allocator import tune
from rolemesh.workers.offloading import Offloader

SWITCH = "rolemesh_lease_switch_seconds"
RESULTS = ROOT / "benchmarks" / "results"


@dataclass
class Placement:
    """The demo under one strategy, its roles served."""

    processes: RoleProcesses
    one_step: OneStep
    seconds: list[float] = field(default_factory=list)

    def switches(self) -> tuple[float, float]:
        """How many there have been, and their seconds, of all processes."""
        count = seconds = 0.0
        for member in self.processes.members:
            where = json.loads(member.address_file.read_text())["metrics"]
            page = urllib.request.urlopen(f"http://{where}/metrics").read().decode()
            samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
            count += sum(s.value for s in samples if s.name == f"{SWITCH}_count")
            seconds += sum(s.value for s in samples if s.name == f"{SWITCH}_sum")
        return count, seconds


async def placed(strategy: str, directory: Path, stack: AsyncExitStack) -> Placement:
    """Starts the demo's roles under a strategy."""
    overrides = [f"trainer.default_local_dir={directory / strategy}", f"placement.strategy={strategy}"]
    job = load_job(ROOT / "configs" / "tiny.yaml", overrides)
    processes = await stack.enter_async_context(role_processes(job))
    addresses = await processes.addresses(job.trainer.ready_timeout_s)
    clients: dict[str, Any] = {
        role: await stack.enter_async_context(new_client(role, addresses[role], job)) for role in job.roles
    }
    await until_ready(clients.values(), job.trainer.ready_timeout_s)
    return Placement(processes, stepper(job, Roles(**clients)))


async def measure_steps(rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Seconds a step for each round, and switches a step, of each strategy."""
    prepare_demo(DEMO)
    names = [name for name, groups in strategies().items() if groups]
    with TemporaryDirectory(dir=DEMO) as directory:
        async with AsyncExitStack() as stack:
            placements = {name: await placed(name, Path(directory), stack) for name in names}
            for placement in placements.values():  # warm up
                await placement.one_step(1)
            before = {name: placement.switches() for name, placement in placements.items()}
            for round in range(rounds):
                ends: list[Metrics] = []
                for placement in placements.values():
                    began = time.perf_counter()
                    for number in range(2 + round * steps, 2 + (round + 1) * steps):
                        metrics = await placement.one_step(number)
                    placement.seconds.append((time.perf_counter() - began) / steps)
                    ends.append(metrics)
                assert all(end == ends[0] for end in ends), "the placements did not make the same steps"
            results = {}
            for name, placement in placements.items():
                count, seconds = (
                    (after - start) / (rounds * steps)
                    for after, start in zip(placement.switches(), before[name], strict=True)
                )
                results[name] = {
                    "seconds_per_step": placement.seconds,
                    "switches_per_step": count,
                    "switch_seconds_per_step": seconds,
                }
            return results


def measure_switch(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds to offload and reload `num_bytes` in many tensors, and to move one buffer of that size in the
    same way: to pinned memory and back on CUDA, else to a file and back."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors = [torch.ones(num_bytes // 256, dtype=torch.uint8, device=device) for _ in range(256)]
    whole = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) if device.type == "cuda" else None
    with TemporaryDirectory(dir=DEMO) as directory:
        offloader = Offloader(lambda: tensors, device, Path(directory))

        def switch() -> None:
            offloader.offload()
            offloader.reload()

        def plain() -> None:
            if pinned is not None:
                pinned.copy_(whole)
                whole.copy_(pinned)
                return
            with TemporaryFile(dir=directory, buffering=0) as file:
                at = 0
                data = whole.numpy().data
                while at < num_bytes:
                    at += file.write(data[at:])
                file.seek(0)
                into = memoryview(mmap.mmap(-1, num_bytes))  # fresh memory, as a role wakes in
                at = 0
                while at < num_bytes:
                    at += file.readinto(into[at:])

        contestants: dict[str, Callable[[], None]] = {"switch": switch, "plain copy": plain}
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(rounds + 1):
            for name, contestant in contestants.items():
                began = time.perf_counter()
                contestant()
                seconds[name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}  # the first warms up


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Median seconds of a step, the part that is switching set apart."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3))
    names = list(results)
    step = [statistics.median(results[name]["seconds_per_step"]) for name in names]
    switching = [results[name]["switch_seconds_per_step"] for name in names]
    axes.barh(names, step, label="step")
    axes.barh(names, switching, label="of it, switching (over all devices)")
    axes.set(xlabel="seconds", title="The demo's step under each placement, one machine")
    axes.invert_yaxis()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(
    rounds: Annotated[int, typer.Option(help="How often each strategy has its turn.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps in a turn.")] = 3,
    megabytes: Annotated[int, typer.Option(help="Memory of a role whose switch is measured.")] = 512,
) -> None:
    """Prints seconds a step and the switch's ratio, and writes benchmarks/results/placements.json and .png."""
    tune()
    results = asyncio.run(measure_steps(rounds, steps))
    switch = measure_switch(megabytes << 20, 7)
    ratio = min(switch["switch"]) / min(switch["plain copy"])
    table = Table(title=f"the demo's step under each placement, {rounds} rounds of {steps}")
    for heading in ("", "minimum s", "median s", "switches", "switching s"):
        table.add_column(heading, justify="right")
    for name, of in results.items():
        numbers = [min(of["seconds_per_step"]), statistics.median(of["seconds_per_step"])]
        switches = [f"{of['switches_per_step']:.1f}", f"{of['switch_seconds_per_step']:.3f}"]
        table.add_row(name, *(f"{number:.3f}" for number in numbers), *switches)
    Console().print(table)
    Console().print(f"a switch of {megabytes} MiB against a plain copy of them (aim: at most 1.1): {ratio:.2f}")
    RESULTS.mkdir(exist_ok=True)
    kept = {"placements": results, "switch": {"bytes": megabytes << 20, "seconds": switch, "ratio": ratio}}
    (RESULTS / "placements.json").write_text(json.dumps(kept, indent=2) + "\n")
    draw(results, RESULTS / "placements.png")


if __name__ == "__main__":
    typer.run(main)
