"""Implements `rolemesh plan`: memory and time of every strategy, the best first, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rolemesh.config import JobConfig
from rolemesh.config.placement import strategies
from rolemesh.planner.device_specs import human_size
from rolemesh.planner.estimate import Estimate
from rolemesh.planner.memory import Memory

COLOURS = {
    "weights": "blue",
    "gradients": "magenta",
    "optimizer": "yellow",
    "activations": "green",
    "kv_cache": "cyan",
}
HEADINGS = {"gradients": "grads", "optimizer": "optim", "activations": "activ"}
BAR_CELLS = 20
ROOM_FOR_BARS = 104  # minimum width of the terminal for showing bars


# ---------------------------------------------------------------------------------- for people


def show(
    job: JobConfig, plans: Sequence[Estimate], *, searched: bool = False, console: Console | None = None
) -> None:
    """Print a block for each plan: seconds by phase, then its groups and roles with their memory.

    After a search, also print the placement section of the best plan, if the job can run with it.
    """
    console = console or Console()
    cluster = plans[0].cluster
    device = cluster.device
    data = job.data
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
        console.print(f"\n[bold]the job can run in no grouping:[/] the nearest {plans[0].verdict}")


def _block(place: int, plan: Estimate, *, bars: bool) -> Group:
    verdict = Text(plan.verdict, "bold green" if plan.fits else "bold red")
    phases = " · ".join(f"{_words(name)} {_seconds(value)}" for name, value in plan.phases.items() if value)
    head = Text.assemble(
        (f"{place}. {plan.name}", "bold"), "  ", verdict, f"  {_seconds(plan.seconds)} a step\n   {phases}"
    )
    shared = plan.cluster.device.shared
    table = Table(box=None, padding=(0, 1, 0, int(bars)), pad_edge=False)  # without bars it fits 80 columns
    parts = [_words(HEADINGS.get(name, name)) for name in COLOURS]
    for heading in ("group", *([] if shared else ["GPUs"]), "role", *parts, "total", *([""] if bars else [])):
        table.add_column(heading, justify="left" if heading in ("group", "role", "") else "right", no_wrap=True)
    for group in plan.groups:
        for role in group.roles:
            first = role == group.roles[0]
            memory = group.memory[role]
            num_devices = str(group.devices) if first else ""
            table.add_row(
                group.name if first else "",
                *([] if shared else [num_devices]),
                role,
                *(human_size(size) if size else "·" for size in memory.parts().values()),
                human_size(memory.total) if memory.total else "·",
                *([_bar(memory, plan.cluster.device.memory_bytes)] if bars else []),
            )
    return Group(head, table, *(Text(f"   {note}", "dim") for note in notes(plan)))


def notes(plan: Estimate) -> list[str]:
    """List what the plan lacks, and what it assumes."""
    memory = plan.cluster.device.usable_bytes
    lines = [plan.blocked] if plan.blocked else []
    rollouts = [group.memory["rollout"] for group in plan.groups if "rollout" in group.roles]
    if rollouts and not any(memory.total for memory in rollouts):
        lines.append("other servers generate: their memory and time are not counted")
    if plan.missing_devices:
        lines.append(f"{plan.missing_devices} more GPUs are needed: a group with a model needs at least one")
    if plan.cluster.device.shared:
        if plan.missing_bytes:
            lines.append(f"all groups together miss {human_size(plan.missing_bytes)}")
        return lines
    for group in plan.groups:
        if (missing := group.peak_bytes - memory) > 0:
            lines.append(f"each GPU of {group.name} misses {human_size(missing)}")
        if group.asleep:
            lines.append(f"a rollout that sleeps keeps {human_size(group.asleep)} of each GPU of {group.name}")
        if group.host is not None:
            parts = ", ".join(f"{name} {human_size(size)}" for name, size in asdict(group.host).items() if size)
            lines.append(
                f"a pod of {group.name} needs about {human_size(group.host.total)} of host memory for its "
                f"rollout ({parts})"
            )
        if group.ranks > 1:
            engines = ", and an engine of its own" if group.memory.get("rollout", Memory()).total else ""
            lines.append(
                f"{group.name} has {group.ranks} ranks, each with its share of the state (FSDP){engines}"
            )
    if idle := plan.cluster.devices - sum(group.devices for group in plan.groups):
        lines.extend([f"{idle} GPUs stay idle: they would not shorten the step"] if idle > 0 else [])
    return lines


def _bar(memory: Memory, capacity: int) -> Text:
    """Draw the memory's parts to scale; the part beyond the device's capacity is red."""
    bar = Text()
    filled = 0
    end = 0
    for name, size in memory.parts().items():
        end += size
        cells = min(round(BAR_CELLS * end / capacity), 2 * BAR_CELLS) - filled
        inside = max(0, min(cells, BAR_CELLS - filled))
        bar.append("█" * inside, COLOURS[name]).append("█" * (cells - inside), "red")
        filled += cells
    return bar.append("─" * max(0, BAR_CELLS - filled), "dim")


def _seconds(value: float) -> str:
    if value >= 9.95:
        return f"{value:.1f} s"
    if value >= 0.0995:
        return f"{value:.2f} s"
    return f"{value:.3f} s"


def _words(name: str) -> str:
    return name.replace("kv_", "KV ").replace("_", " ")


# -------------------------------------------------------------------------------- for machines


def to_json(job: JobConfig, plans: Sequence[Estimate]) -> list[dict[str, Any]]:
    """Convert plans to JSON-like data; sizes in bytes, times in seconds."""
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
                    "ranks": group.ranks,
                    "peak_bytes": group.peak_bytes,
                    "host": asdict(group.host) if group.host else {},
                    "roles": {role: memory.parts() for role, memory in group.memory.items()},
                }
                for group in plan.groups
            ],
            "placement": _placement(job, plan),
            "notes": notes(plan),
        }
        for plan in plans
    ]


def to_yaml(job: JobConfig, plan: Estimate) -> str:
    """Return the plan as the placement section of a job file."""
    return yaml.safe_dump({"placement": _placement(job, plan)}, sort_keys=False)


def _placement(job: JobConfig, plan: Estimate) -> dict[str, Any]:
    """Return the section's keys. The launcher, and replicas of roles without a device, are the job file's."""
    placement: dict[str, Any] = {"strategy": plan.name}
    if not strategies().get(plan.name):
        placement = {"strategy": "custom", "groups": {group.name: list(group.roles) for group in plan.groups}}
    if job.placement.launcher != "processes":
        placement["launcher"] = job.placement.launcher
    replicas: dict[str, int] = {}
    for group in plan.groups:
        split = job.rollout.tensor_model_parallel_size if "rollout" in group.roles else 1
        for role in group.roles:
            written = job.placement.replicas.get(role, 1)
            replicas[role] = group.devices // group.ranks // split if group.devices else written
    replicas = {role: count for role, count in replicas.items() if count > 1}
    ranks = {group.name: group.ranks for group in plan.groups if group.ranks > 1}
    counts = {name: count for name, count in (("replicas", replicas), ("ranks", ranks)) if count}
    return placement | counts
