"""What `rolemesh plan` does: every strategy's memory and time, the best first, for people or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rolemesh.config import JobConfig
from rolemesh.config.placement import strategies
from rolemesh.errors import InvalidConfig
from rolemesh.planner.devices import GPUS, Device, available_memory, cpu, human_size, parse_size
from rolemesh.planner.memory import Memory, role_shapes
from rolemesh.planner.plan import Cluster, Plan, Planner, best_first
from rolemesh.planner.search import search

COLOURS = {
    "weights": "blue",
    "gradients": "magenta",
    "optimizer": "yellow",
    "activations": "green",
    "kv_cache": "cyan",
}
HEADINGS = {"gradients": "grads", "optimizer": "optim", "activations": "activ"}
BAR_CELLS = 20
ROOM_FOR_BARS = 104  # columns of the terminal
SEARCHED = "found by search"


def cluster_of(num_gpus: int, gpu: str, memory: str) -> Cluster:
    """GPUs of one kind, or with none of them this machine's CPU.

    Raises:
        InvalidConfig: a kind that nobody has written down, or no size.
    """
    if num_gpus and gpu not in GPUS:
        raise InvalidConfig(f"--gpu {gpu}: known are {', '.join(GPUS)}; another one's memory is --gpu-memory")
    device: Device = GPUS[gpu] if num_gpus else cpu(available_memory())
    if memory:
        device = replace(device, memory_bytes=parse_size(memory))
    return Cluster(device, max(1, num_gpus))


def make_plans(job: JobConfig, cluster: Cluster, *, searching: bool) -> list[Plan]:
    """A plan of each strategy, and where it is asked for that of the best grouping of all, if it is better than
    they; the best first."""
    planner = Planner(job, role_shapes(job), cluster)
    tables = {name: table or job.placement.groups for name, table in strategies().items()}
    plans = best_first([planner.plan(name, table) for name, table in tables.items() if table])
    if searching and (found := search(planner, SEARCHED)).order < plans[0].order:
        return [found, *plans]
    return plans


# ---------------------------------------------------------------------------------- for people


def show(
    job: JobConfig, plans: Sequence[Plan], *, searched: bool = False, console: Console | None = None
) -> None:
    """A block for each plan: its groups and roles with their memory, then seconds by phase. After a search also
    the placement section of the best one, if the job can be run so."""
    console = console or Console()
    cluster = plans[0].cluster
    device, data = cluster.device, job.data
    rows = data.train_batch_size * job.rollout.n
    of = f"{cluster.devices} × {device.name} of " if not device.shared else "this machine's CPU with "
    console.print(
        f"{of}{human_size(device.memory_bytes)}; a step of {rows} rows, {data.max_prompt_length} prompt and "
        f"{data.max_response_length} response tokens each",
        highlight=False,
    )
    legend = Text.assemble(
        *(part for name, colour in COLOURS.items() for part in ((" █ ", colour), _words(name)))
    )
    console.print(legend)
    for place, plan in enumerate(plans, 1):
        console.print()
        console.print(_block(place, plan, bars=console.width >= ROOM_FOR_BARS))
    if searched and plans[0].fits:
        console.print("\n[bold]the best of all groupings[/], for the job file:\n")
        console.print(to_yaml(job, plans[0]), highlight=False, markup=False)
    elif searched:
        console.print(f"\n[bold]of all groupings none can be run:[/] the nearest {plans[0].verdict}")


def _block(place: int, plan: Plan, *, bars: bool) -> Group:
    verdict = Text(plan.verdict, "bold green" if plan.fits else "bold red")
    phases = " · ".join(f"{_words(name)} {_seconds(value)}" for name, value in plan.phases.items() if value)
    head = Text.assemble(
        (f"{place}. {plan.name}", "bold"), "  ", verdict, f"  {_seconds(plan.seconds)} a step\n   {phases}"
    )
    shared = plan.cluster.device.shared
    table = Table(box=None, padding=(0, 1, 0, int(bars)), pad_edge=False)  # where it is narrow, all fits in 80
    parts = [_words(HEADINGS.get(name, name)) for name in COLOURS]
    for heading in ("group", *([] if shared else ["GPUs"]), "role", *parts, "total", *([""] if bars else [])):
        table.add_column(heading, justify="left" if heading in ("group", "role", "") else "right", no_wrap=True)
    for group in plan.groups:
        for role in group.roles:
            first = role == group.roles[0]
            memory = group.memory[role]
            table.add_row(
                group.name if first else "",
                *([] if shared else [str(group.devices) if first else ""]),
                role,
                *(human_size(size) if size else "·" for size in memory.parts().values()),
                human_size(memory.total) if memory.total else "·",
                *([_bar(memory, plan.cluster.device.memory_bytes)] if bars else []),
            )
    return Group(head, table, *(Text(f"   {note}", "dim") for note in notes(plan)))


def notes(plan: Plan) -> list[str]:
    """By how much it does not fit, and what it takes for granted."""
    memory, lines = plan.cluster.device.memory_bytes, [plan.blocked] if plan.blocked else []
    if not any(group.memory["rollout"].total for group in plan.groups if "rollout" in group.roles):
        lines.append("other servers generate: their memory and their time are not counted")
    if plan.missing_devices:
        lines.append(f"{plan.missing_devices} more GPUs are needed: a group with a model has at least one")
    if plan.cluster.device.shared:
        if plan.missing_bytes:
            lines.append(f"all groups together miss {human_size(plan.missing_bytes)}")
        return lines
    for group in plan.groups:
        if (missing := group.peak_bytes - memory) > 0:
            lines.append(f"each GPU of {group.name} misses {human_size(missing)}")
        if group.needs_ranks:
            lines.append(
                f"{group.name} would train on {group.devices} GPUs, each with its share of the state (FSDP), "
                "which cannot be run yet"
            )
    if idle := plan.cluster.devices - sum(group.devices for group in plan.groups):
        lines.extend([f"{idle} GPUs stay idle: they would shorten nothing"] if idle > 0 else [])
    return lines


def _bar(memory: Memory, capacity: int) -> Text:
    """The parts to scale; what is beyond the device's end is red."""
    bar, filled, end = Text(), 0, 0
    for name, size in memory.parts().items():
        end += size
        cells = min(round(BAR_CELLS * end / capacity), 2 * BAR_CELLS) - filled
        inside = max(0, min(cells, BAR_CELLS - filled))
        bar.append("█" * inside, COLOURS[name]).append("█" * (cells - inside), "red")
        filled += cells
    return bar.append("─" * max(0, BAR_CELLS - filled), "dim")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 9.95 else f"{value:.2f} s" if value >= 0.0995 else f"{value:.3f} s"


def _words(name: str) -> str:
    return name.replace("kv_", "KV ").replace("_", " ")


# -------------------------------------------------------------------------------- for machines


def to_json(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Each plan as plain data; sizes in bytes, times in seconds."""
    return [
        {
            "strategy": plan.name,
            "fits": plan.fits,
            "verdict": plan.verdict,
            "missing_bytes": plan.missing_bytes,
            "missing_devices": plan.missing_devices,
            "seconds_per_step": plan.seconds,
            "phases": plan.phases,
            "groups": [
                {
                    "name": group.name,
                    "devices": group.devices,
                    "peak_bytes": group.peak_bytes,
                    "roles": {role: memory.parts() for role, memory in group.memory.items()},
                }
                for group in plan.groups
            ],
            "notes": notes(plan),
        }
        for plan in plans
    ]


def to_yaml(job: JobConfig, plan: Plan) -> str:
    """The placement section of a job file."""
    placement: dict[str, Any] = {"strategy": plan.name}
    if not strategies().get(plan.name):
        placement = {"strategy": "custom", "groups": {group.name: list(group.roles) for group in plan.groups}}
    split = job.rollout.tensor_model_parallel_size
    replicas = {
        role: group.devices // (split if "rollout" in group.roles else 1)
        for group in plan.groups
        for role in group.roles
        if group.devices > 1 and not group.needs_ranks
    }
    return yaml.safe_dump(
        {"placement": placement | ({"replicas": replicas} if replicas else {})}, sort_keys=False
    )
