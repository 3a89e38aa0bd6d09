"""A plan: groups of roles on devices, what each needs, and how long a step takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

from rolemesh.config import JobConfig
from rolemesh.config.rollout import CHUNKS_PER_BATCH
from rolemesh.planner.cost import handover_seconds, role_seconds
from rolemesh.planner.devices import Device
from rolemesh.planner.memory import Memory, Shapes, role_memory

Grouping = Mapping[str, Sequence[str]]  # a group's name to its roles

TRAINED = ("actor", "critic")
FITS = "fits"
PHASES = ("generate", "judge", "update", "weights", "switches")
# When a role of a shared group has its turn in a step, as the pages ask.
TURNS = ("rollout", "actor", "reference", "critic", "reward", "critic", "actor")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Args:
        devices: how many; of a shared one (a CPU) 1.
    """

    device: Device
    devices: int


@dataclass(frozen=True)
class Group:
    """Roles that take turns on the same devices.

    Args:
        devices: how many; 0 of a group without a model.
        memory: of each role, on each of the devices.
        seconds: of each role, by phase.
    """

    name: str
    roles: tuple[str, ...]
    devices: int
    memory: Mapping[str, Memory]
    seconds: Mapping[str, Mapping[str, float]]

    @property
    def peak_bytes(self) -> int:
        """Of the role that needs the most: the others sleep."""
        return max((memory.total for memory in self.memory.values()), default=0)

    @property
    def needs_ranks(self) -> bool:
        """It trains on several devices."""
        return self.devices > 1 and any(role in TRAINED for role in self.roles)

    def busy(self, phase: str) -> float:
        """Seconds of a phase: one role after the other."""
        return sum(phases.get(phase, 0.0) for phases in self.seconds.values())

    def switching(self, device: Device) -> float:
        """Seconds a step of leaving and entering the device, where several roles share it. A role that is asked
        twice in a row stays; the step after begins where this one ends."""
        turns = [role for role in TURNS if role in self.roles and self.memory[role].state]
        changes = [(a, b) for a, b in zip(turns, turns[1:] + turns[:1], strict=True) if a != b]
        moved = sum(self.memory[out].state + self.memory[into].state for out, into in changes)
        return moved / device.host_bandwidth


@dataclass(frozen=True)
class Plan:
    """One way to place a job.

    Args:
        ahead: the job's rollouts run ahead of training.
        handover: seconds from the actor's new weights to the rollouts'.
    """

    name: str
    groups: tuple[Group, ...]
    cluster: Cluster
    ahead: bool
    handover: float

    @cached_property
    def blocked(self) -> str:
        """Why the job may not be placed so, whatever the devices; empty: it may."""
        home = next(group for group in self.groups if "rollout" in group.roles)
        others = [role for role in home.roles if role != "rollout" and home.memory[role].total]
        if self.ahead and others:
            return f"rollout.mode async, and rollout shares its group with {', '.join(others)}"
        return ""

    @cached_property
    def missing_bytes(self) -> int:
        """By how much devices are too small, added up; 0: it fits."""
        memory = self.cluster.device.memory_bytes
        if self.cluster.device.shared:
            return max(0, sum(group.peak_bytes for group in self.groups) - memory)
        return sum(max(0, group.peak_bytes - memory) for group in self.groups)

    @property
    def missing_devices(self) -> int:
        used = sum(group.devices for group in self.groups)
        return 0 if self.cluster.device.shared else max(0, used - self.cluster.devices)

    @property
    def needs_ranks(self) -> bool:
        """A trained role is on several devices, which no role can do yet."""
        return any(group.needs_ranks for group in self.groups)

    @property
    def verdict(self) -> str:
        """Whether the job can be run so, in words."""
        if self.blocked:
            return "is refused"
        if self.missing_bytes or self.missing_devices:
            return "does not fit"
        return "cannot be run yet" if self.needs_ranks else FITS

    @property
    def fits(self) -> bool:
        """The job can be run so, today."""
        return self.verdict == FITS

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds by phase. Groups work beside each other, roles of a group one after another. Rows that are
        finished are judged while others are generated, except in the rollout's own group; the last chunk of
        them is judged when the generation has ended."""
        device = self.cluster.device
        together = sum if device.shared else max
        judged = {g.name: g.busy("judge") for g in self.groups}
        generate = sum(g.busy("generate") for g in self.groups)
        at_rollout = next(g for g in self.groups if "rollout" in g.roles)
        if not device.shared:
            judged = {
                name: s if name == at_rollout.name else max(s / CHUNKS_PER_BATCH, s - generate)
                for name, s in judged.items()
            }
        return {
            "generate": generate,
            "judge": together(judged.values()),
            "update": together([g.busy("update") for g in self.groups]),
            "weights": self.handover,
            "switches": together([g.switching(device) for g in self.groups]),
        }

    @cached_property
    def seconds(self) -> float:
        """Of one step."""
        seconds = self.phases
        if not self.ahead or self.blocked or self.cluster.device.shared:
            return sum(seconds.values())
        rest = seconds["judge"] + seconds["update"] + seconds["switches"]
        return max(seconds["generate"], rest) + seconds["weights"]

    def gain_over(self, smaller: Plan) -> tuple[float, float]:
        """For each device more: bytes that are missing no longer, seconds."""
        more = sum(g.devices for g in self.groups) - sum(g.devices for g in smaller.groups)
        return (smaller.missing_bytes - self.missing_bytes) / more, (smaller.seconds - self.seconds) / more

    @property
    def order(self) -> tuple[bool, int, int, int, float, float]:
        """Smaller is better: fits, can be run today, is fast, leaves devices idle."""
        busy = sum(sum(g.busy(phase) for phase in PHASES) for g in self.groups)
        ranks = sum(g.needs_ranks for g in self.groups)
        return bool(self.blocked), self.missing_devices, self.missing_bytes, ranks, self.seconds, busy


class Planner:
    """Plans of one job on one cluster.

    Args:
        shapes: rolemesh.planner.memory.role_shapes(job).
    """

    def __init__(self, job: JobConfig, shapes: Shapes, cluster: Cluster) -> None:
        self.job, self.shapes, self.cluster = job, shapes, cluster
        self._groups: dict[tuple[tuple[str, ...], int], Group] = {}

    def plan(self, name: str, grouping: Grouping) -> Plan:
        """The groups with the devices divided among them.

        Greedy, as in HybridFlow's mapping (arXiv:2409.19256, §6): every group has the fewest that it can run
        on; then the groups that do not fit grow, and then those whose growth shortens the step the most for
        each device. Groups that work beside each other shorten nothing alone, so they grow together too.
        Devices that shorten nothing stay idle.
        """
        best = self._plan(name, self._smallest(grouping))
        while grown := [plan for plan in self._grown(best) if plan.order < best.order]:
            best = max(grown, key=lambda plan: plan.gain_over(best))
        return best

    def _smallest(self, grouping: Grouping) -> dict[str, Group]:
        roles = {
            label: tuple(role for role in roles if role in self.job.roles) for label, roles in grouping.items()
        }
        return {
            label: self._group(present, self._fewest(present)) for label, present in roles.items() if present
        }

    def _grown(self, plan: Plan) -> Iterator[Plan]:
        """With a device, or a replica's devices, more for any of the groups that have devices."""
        if self.cluster.device.shared:
            return
        growing = [group for group in plan.groups if group.devices]
        groups = {group.name: group for group in plan.groups}
        for count in range(1, len(growing) + 1):
            for chosen in combinations(growing, count):
                larger = {g.name: self._group(g.roles, g.devices + self._fewest(g.roles)) for g in chosen}
                candidate = self._plan(plan.name, groups | larger)
                if not candidate.missing_devices:
                    yield candidate

    def divided(self, name: str, grouping: Grouping, devices: Mapping[str, int]) -> Plan:
        """The groups with so many devices each."""
        return self._plan(
            name, {label: self._group(tuple(grouping[label]), devices[label]) for label in grouping}
        )

    def _plan(self, name: str, groups: Mapping[str, Group]) -> Plan:
        named = tuple(replace(group, name=label) for label, group in groups.items())
        home = {role: group for group in named for role in group.roles}
        together = home["actor"].name == home["rollout"].name
        handover = handover_seconds(self.job, self.shapes, self.cluster.device, together=together)
        ahead = self.job.rollout.mode == "async" and self.job.trainer.max_staleness > 0
        return Plan(name, named, self.cluster, ahead, handover)

    def _group(self, roles: tuple[str, ...], devices: int) -> Group:
        if (roles, devices) not in self._groups:
            device, count = self.cluster.device, max(1, devices)
            memory = {
                role: role_memory(self.job, role, self.shapes, device, count if role in TRAINED else 1)
                for role in roles
            }
            seconds = {role: role_seconds(self.job, role, self.shapes, device, count) for role in roles}
            self._groups[roles, devices] = Group("", roles, devices, memory, seconds)
        return self._groups[roles, devices]

    def _fewest(self, roles: Sequence[str]) -> int:
        """Devices of one replica; none without a model."""
        if not any(role in self.shapes for role in roles):
            return 0
        return self.job.rollout.tensor_model_parallel_size if "rollout" in roles else 1


def best_first(plans: Sequence[Plan]) -> list[Plan]:
    return sorted(plans, key=lambda plan: plan.order)
