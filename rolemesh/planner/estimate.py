"""Estimates of placements: groups of roles on devices, their memory, and the seconds of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import lcm

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.placement import takes_world_size
from rolemesh.config.rollout import CHUNKS_PER_BATCH, own_rows
from rolemesh.planner.collectives import Spread, smallest
from rolemesh.planner.cost import handover_seconds, role_seconds
from rolemesh.planner.device_specs import Device
from rolemesh.planner.host_memory import HostMemory, host_memory
from rolemesh.planner.memory import Memory, Shapes, asleep_bytes, role_memory

Grouping = Mapping[str, Sequence[str]]  # a group's name to its roles

FITS = "fits"
PHASES = ("generate", "score", "update", "weights", "switches")
# The order in which a step's page calls the roles, i.e. their turns on a shared device.
TURNS = ("rollout", "actor", "reference", "critic", "reward", "critic", "actor")


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind.

    Args:
        device: the kind of device.
        devices: number of devices; 1 for a shared one (a CPU).
    """

    device: Device
    devices: int


@dataclass(frozen=True)
class Counts:
    """The number of processes that a job gives a group.

    Args:
        replicas: of the group.
        ranks: of each replica.
    """

    replicas: int = 1
    ranks: int = 1


@dataclass(frozen=True)
class GroupEstimate:
    """Roles that take turns on the same devices.

    Args:
        name: of the group.
        roles: its roles.
        devices: number of devices; 0 for a group without a model.
        ranks: of each replica, over which its models are spread.
        memory: of each role, on each of the devices.
        host: of a pod with a rollout on GPUs; None without one.
        seconds: of each role, by phase.
        asleep: bytes that its rollout keeps of each device while the other roles compute.
        idle: why its ranks cannot share the rows of a mini-batch or their heads; empty if they can.
    """

    name: str
    roles: tuple[str, ...]
    devices: int
    ranks: int
    memory: Mapping[str, Memory]
    seconds: Mapping[str, Mapping[str, float]]
    host: HostMemory | None = None
    asleep: int = 0
    idle: str = ""

    @property
    def peak_bytes(self) -> int:
        """Memory of the role that needs the most, with what a rollout keeps that sleeps meanwhile."""
        kept = {role: 0 if role == "rollout" else self.asleep for role in self.memory}
        return max((memory.total + kept[role] for role, memory in self.memory.items()), default=0)

    def busy(self, phase: str) -> float:
        """Return the seconds of a phase, in which the group's roles run one after the other."""
        return sum(phases.get(phase, 0.0) for phases in self.seconds.values())

    def switching(self, device: Device) -> float:
        """Return the seconds per step of switching roles on a shared device.

        A role that is called twice in a row stays on the device. The next step starts with the role that is on
        the device at the end of this one. A role's weights are copied to the device, and for an update its
        moments too. When it leaves, only what has changed is copied back.
        """
        visits: list[tuple[str, bool]] = []  # role, and whether it is updated
        for number, role in enumerate(TURNS):
            if role in self.roles and self.memory[role].weights:
                updates = role in TURNS[:number]
                if visits and visits[-1][0] == role:
                    updates |= visits.pop()[1]
                visits.append((role, updates))
        if len(visits) > 1 and visits[0][0] == visits[-1][0]:
            visits[0] = (visits[0][0], visits[0][1] or visits.pop()[1])
        if len(visits) < 2:
            return 0.0
        return sum(self._moved(role, updates, device) for role, updates in visits) / device.host_bandwidth

    def _moved(self, role: str, updates: bool, device: Device) -> int:
        """Return the bytes that are copied in and out with a role that is called in between."""
        memory = self.memory[role]
        comes = memory.weights + updates * memory.optimizer
        leaves = updates * memory.changed
        if role == "rollout" or device.shared:  # it gets new weights in between; a CPU keeps no copies
            leaves = comes
        return comes + leaves


@dataclass(frozen=True)
class Estimate:
    """One way to place a job, and what it would take.

    Args:
        name: of the plan, e.g. its strategy.
        groups: the groups with their devices.
        cluster: the devices.
        ahead: whether the job's rollouts run ahead of training.
        handover: seconds to send the actor's new weights to the rollouts.
        split: devices over which the layers of an engine are split.
    """

    name: str
    groups: tuple[GroupEstimate, ...]
    cluster: Cluster
    ahead: bool
    handover: float
    split: int = 1

    @cached_property
    def blocked(self) -> str:
        """Why this placement is invalid on any devices; empty if it is valid."""
        idle = next((group.idle for group in self.groups if group.idle), "")
        home = next((group for group in self.groups if "rollout" in group.roles), None)
        if idle or home is None:
            return idle
        others = [role for role in home.roles if role != "rollout" and home.memory[role].total]
        if self.ahead and others:
            return f"rollout.mode async, but rollout shares its group with {', '.join(others)}"
        if self.split > 1 and home.ranks > 1:
            return (
                f"rollout.tensor_model_parallel_size {self.split}, but {home.name} has {home.ranks} ranks, "
                "each with one GPU and an engine of its own"
            )
        return ""

    @cached_property
    def missing_bytes(self) -> int:
        """Bytes by which devices are too small, summed; 0 if everything fits."""
        memory = self.cluster.device.usable_bytes
        if self.cluster.device.shared:
            return max(0, sum(group.peak_bytes * max(1, group.devices) for group in self.groups) - memory)
        return sum(max(0, group.peak_bytes - memory) for group in self.groups)

    @property
    def missing_devices(self) -> int:
        used = sum(group.devices for group in self.groups)
        return 0 if self.cluster.device.shared else max(0, used - self.cluster.devices)

    @property
    def verdict(self) -> str:
        """One of: fits, does not fit, is refused."""
        if self.blocked:
            return "is refused"
        if self.missing_bytes or self.missing_devices:
            return "does not fit"
        return FITS

    @property
    def fits(self) -> bool:
        """True if the job can run with this plan."""
        return self.verdict == FITS

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds by phase.

        Groups run in parallel, and the roles of a group run one after another. Log-probs, values and scores of
        finished rows are computed while others are generated, except in the rollout's own group. Those of the
        last chunk are computed after the generation.
        """
        device = self.cluster.device
        together = sum if device.shared else max
        scoring = {g.name: g.busy("score") for g in self.groups}
        generate = sum(g.busy("generate") for g in self.groups)
        at_rollout = {g.name for g in self.groups if "rollout" in g.roles}
        if at_rollout and not device.shared:
            scoring = {
                name: s if name in at_rollout else max(s / CHUNKS_PER_BATCH, s - generate)
                for name, s in scoring.items()
            }
        return {
            "generate": generate,
            "score": together(scoring.values()),
            "update": together([g.busy("update") for g in self.groups]),
            "weights": self.handover,
            "switches": together([g.switching(device) for g in self.groups]),
        }

    @cached_property
    def seconds(self) -> float:
        """Seconds of one step."""
        seconds = self.phases
        if not self.ahead or self.blocked or self.cluster.device.shared:
            return sum(seconds.values())
        rest = seconds["score"] + seconds["update"] + seconds["switches"]
        return max(seconds["generate"], rest) + seconds["weights"]

    def gain_over(self, smaller: Estimate) -> tuple[float, float]:
        """Return the gain per additional device: missing bytes saved, and seconds saved."""
        more = sum(g.devices for g in self.groups) - sum(g.devices for g in smaller.groups)
        return (smaller.missing_bytes - self.missing_bytes) / more, (smaller.seconds - self.seconds) / more

    @property
    def order(self) -> tuple[bool, int, int, float, float]:
        """Sort key, smaller is better: a valid plan that fits, is fast, and is least busy."""
        busy = sum(sum(g.busy(phase) for phase in PHASES) for g in self.groups)
        return bool(self.blocked), self.missing_devices, self.missing_bytes, self.seconds, busy


class Planner:
    """Makes plans of one job on one cluster.

    Args:
        job: the job.
        shapes: rolemesh.planner.memory.role_shapes(job).
        cluster: the devices.
    """

    def __init__(self, job: JobConfig, shapes: Shapes, cluster: Cluster) -> None:
        self.job = job
        self.shapes = shapes
        self.cluster = cluster
        self._groups: dict[tuple[tuple[str, ...], int, int], GroupEstimate] = {}

    def plan(self, name: str, grouping: Grouping, given: Mapping[str, Counts] | None = None) -> Estimate:
        """Divide the devices among the groups.

        Args:
            name: of the plan.
            grouping: of the job's roles.
            given: replicas and ranks of the groups whose devices are not to be chosen; of other groups with a
                model but the rollout's, trainer.n_gpus_per_node and nnodes may give the ranks.

        The search is greedy, as in HybridFlow's mapping (arXiv:2409.19256, §6). Every group starts with the
        fewest devices that it can run on. Then groups that do not fit get more, and then those whose growth
        shortens the step the most per device. Groups that run in parallel may shorten the step only together,
        so several groups may grow at once. Devices that would not shorten the step stay idle.
        """
        given = self._of_world(grouping) | {**(given or {})}
        best = self._plan(name, self._smallest(grouping, given))
        while grown := [plan for plan in self._grown(best, given) if plan.order < best.order]:
            best = max(grown, key=lambda plan: plan.gain_over(best))
        return best

    def _of_world(self, grouping: Grouping) -> dict[str, Counts]:
        """Return the ranks of groups by trainer.n_gpus_per_node and nnodes, as the job's num_ranks does."""
        if (world := self.job.trainer.world_size) is None:
            return {}
        models = {role for role in self.job.roles if self.job.on_device(role)}
        spread = [label for label, roles in grouping.items() if takes_world_size(models & {*roles})]
        return {label: Counts(ranks=world) for label in spread}

    def _smallest(self, grouping: Grouping, given: Mapping[str, Counts]) -> dict[str, GroupEstimate]:
        roles = {
            label: tuple(role for role in roles if role in self.job.roles) for label, roles in grouping.items()
        }
        return {
            label: self._given(present, given[label])
            if label in given
            else self._group(present, self._fewest(present))
            for label, present in roles.items()
            if present
        }

    def _grown(self, plan: Estimate, given: Mapping[str, Counts]) -> Iterator[Estimate]:
        """Yield plans in which some of the groups with devices have one more device, or one more replica's."""
        if self.cluster.device.shared:
            return
        growing = [group for group in plan.groups if group.devices and group.name not in given]
        groups = {group.name: group for group in plan.groups}
        for count in range(1, len(growing) + 1):
            for chosen in combinations(growing, count):
                larger = {g.name: self._group(g.roles, g.devices + self._fewest(g.roles)) for g in chosen}
                candidate = self._plan(plan.name, groups | larger)
                if not candidate.missing_devices:
                    yield candidate

    def divided(self, name: str, grouping: Grouping, devices: Mapping[str, int]) -> Estimate:
        """Make a plan with given numbers of devices for each group."""
        return self._plan(
            name, {label: self._group(tuple(grouping[label]), devices[label]) for label in grouping}
        )

    def _plan(self, name: str, groups: Mapping[str, GroupEstimate]) -> Estimate:
        named = tuple(replace(group, name=label) for label, group in groups.items())
        home = {role: group for group in named for role in group.roles}
        handover = 0.0
        if "rollout" in home:
            together = home["actor"].name == home["rollout"].name
            ranks = home["actor"].ranks
            device = self.cluster.device
            handover = handover_seconds(self.job, self.shapes, device, ranks, together=together)
        ahead = self.job.rollout.mode == "async" and self.job.trainer.max_staleness > 0
        split = self.job.rollout.tensor_model_parallel_size if "rollout" in self.shapes else 1
        return Estimate(
            name=name, groups=named, cluster=self.cluster, ahead=ahead, handover=handover, split=split
        )

    def _given(self, roles: tuple[str, ...], counts: Counts) -> GroupEstimate:
        devices = self._fewest(roles) and counts.replicas * counts.ranks
        return self._group(roles, devices * self._split(roles), counts.ranks)

    def _group(self, roles: tuple[str, ...], devices: int, ranks: int | None = None) -> GroupEstimate:
        """Return a group on `devices` devices, in replicas of `ranks` ranks; None: as `_ranks` finds."""
        if ranks is None:
            ranks = self._ranks(roles, max(1, devices))
        if (roles, devices, ranks) not in self._groups:
            device = self.cluster.device
            count = max(1, devices)
            is_alone = not device.shared and sum(role in self.shapes for role in roles) == 1
            rows = own_rows(device.memory_bytes, device.name) if is_alone else None
            job = self.job.with_rows_and_share(rows)
            memory = {role: role_memory(job, role, self.shapes, device, ranks) for role in roles}
            seconds = {role: role_seconds(job, role, self.shapes, device, count, ranks) for role in roles}
            engines = min(ranks, device.per_node) if any(ROLES[role].trained for role in roles) else 1
            host = None if device.shared else host_memory(self.job, self.shapes, roles, engines)
            idle = next(filter(None, (self._idle(role, ranks) for role in roles)), "")
            asleep = 0 if is_alone or "rollout" not in roles else asleep_bytes(job, device)
            found = GroupEstimate(
                name="",
                roles=roles,
                devices=devices,
                ranks=ranks,
                memory=memory,
                seconds=seconds,
                host=host,
                asleep=asleep,
                idle=idle,
            )
            self._groups[roles, devices, ranks] = found
        return self._groups[roles, devices, ranks]

    def _idle(self, role: str, ranks: int) -> str:
        """Return why the job file or the role refuses this number of ranks; empty if both accept it."""
        if not ROLES[role].trained:
            return ""
        rows = self.job.mini_batch_size(role) * self.job.rollout.n
        parts = Spread.of(self.job, role, ranks).streams
        shape = self.shapes.get(role)
        size = Spread.of(self.job, role, ranks).together
        if shape and (shape.heads % size or (shape.kv_heads % size and size % shape.kv_heads)):
            return (
                f"{role} has {shape.heads} attention heads and {shape.kv_heads} heads of keys and values, "
                f"which do not divide among the {size} ranks that compute a row"
            )
        if parts <= rows:
            return ""
        return (
            f"a mini-batch of {role} has {rows} rows, fewer than the {parts} parts that {ranks} ranks compute"
        )

    def _ranks(self, roles: Sequence[str], devices: int) -> int:
        """Return the ranks of a replica: a trained group's are all devices, another's as few as it fits on.

        An engine in a trained group may be split over devices only if the group has one rank.
        """
        if any(ROLES[role].trained for role in roles):
            return max(1, devices // self._split(roles))
        if "rollout" in roles or self.cluster.device.shared:
            return 1
        divisors = [ranks for ranks in range(1, devices + 1) if devices % ranks == 0]
        most = self.cluster.device.usable_bytes
        needed = {
            ranks: max(
                role_memory(self.job, role, self.shapes, self.cluster.device, ranks).total for role in roles
            )
            for ranks in divisors
        }
        return next((ranks for ranks in divisors if needed[ranks] <= most), devices)

    def _fewest(self, roles: Sequence[str]) -> int:
        """Return the devices of the smallest replica; 0 without a model."""
        if not any(role in self.shapes for role in roles):
            return 0
        if any(ROLES[role].trained for role in roles) and not self.cluster.device.shared:
            spread = [role for role in roles if role in self.shapes and role != "rollout"]
            return lcm(*(smallest(self.job, role) for role in spread)) * self._split(roles)
        return self._split(roles)

    def _split(self, roles: Sequence[str]) -> int:
        """Return the devices of each rank: those over which an engine of the group is split."""
        return self.job.rollout.tensor_model_parallel_size if "rollout" in roles else 1


def best_first(plans: Sequence[Estimate]) -> list[Estimate]:
    return sorted(plans, key=lambda plan: plan.order)
