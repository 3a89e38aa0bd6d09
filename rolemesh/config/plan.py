"""The deployment of a job: its groups of roles, their replicas, ranks and devices, and the paths of their pods.

This is the one place that decides it. `rolemesh run`, `rolemesh serve`, Ray's launcher and `rolemesh plan` read
a Plan. The chart looks the same facts up in tables that helm_values/tables.py generates from here, and
tests/charts/test_drawn_jobs.py compares the two.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rolemesh.catalog.role_specs import ROLES
from rolemesh.config.base import Config, path_keys, value_at
from rolemesh.config.job_sections import JobSections
from rolemesh.config.placement import num_ranks, num_replicas, place

RUN_DIR = "trainer.default_local_dir"
RESUME_DIR = "trainer.resume_from_path"
WEIGHTS_DIR = "rollout.openai.weights_dir"
DUMPS = ("trainer.rollout_data_dir", "trainer.validation_data_dir")
PATHS = tuple(path_keys(JobSections))


def sections_of(role: str) -> tuple[str, ...]:
    """Return the keys and sections of the job in which a role finds the paths that it reads."""
    own = "rollout.multi_turn" if role == "environment" else role
    has_section = own.partition(".")[0] in JobSections.model_fields
    return ("actor.model", "plugins", *([own] if has_section else []))


@dataclass(frozen=True)
class PlannedGroup:
    """Roles that share a process and take turns on its device.

    Args:
        name: of the group.
        roles: its roles, in the placement's order.
        models: those that compute on a device.
        replicas: number of replicas.
        ranks: processes of each replica, over which its models are spread.
        engine_devices: devices of each engine of the rollout, if that has one here.
        reads: paths that it reads, as the job gives them.
        writes: keys of the paths that it writes to. Roles that take turns on a CPU also offload their weights
            to the run directory.
        texts: those in its sections of the job that have a /, so a path may be within.
    """

    name: str
    roles: tuple[str, ...]
    models: tuple[str, ...]
    replicas: int
    ranks: int
    engine_devices: int = 1
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of each replica: one for each rank, or for each of its only engine; 0 without a model."""
        if not self.models:
            return 0
        return self.engine_devices if self.ranks == 1 and "rollout" in self.roles else self.ranks

    @property
    def is_trained(self) -> bool:
        """True if it has a role that training changes. Any other group is stateless."""
        return any(ROLES[role].trained for role in self.roles)

    @property
    def replica_names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{index}" for index in range(self.replicas))

    def only(self, roles: Sequence[str]) -> PlannedGroup:
        """Return the group with these of its roles alone. Without a model it has one rank."""
        models = tuple(role for role in self.models if role in roles)
        own = tuple(role for role in self.roles if role in roles)
        return replace(self, roles=own, models=models, ranks=self.ranks if models else 1)

    def claims(self, mount_paths: Mapping[str, str], working_dir: str) -> set[str]:
        """Return which claims its pod needs for paths of the job.

        Args:
            mount_paths: of each claim, by its name.
            working_dir: where relative paths begin.
        """
        paths = [posixpath.normpath(posixpath.join(working_dir, path)) for path in self.reads]
        found = set()
        for name, mounted in mount_paths.items():
            at = posixpath.normpath(mounted)
            within = re.compile(rf"(^|[^\w./-]){re.escape(at)}([^\w.-]|$)")
            if any(f"{path}/".startswith(f"{at.rstrip('/')}/") for path in paths) or any(
                map(within.search, self.texts)
            ):
                found.add(name)
        return found


@dataclass(frozen=True)
class Plan:
    """The deployment of a job.

    Args:
        groups: in the placement's order.
    """

    groups: tuple[PlannedGroup, ...]

    @classmethod
    def of(cls, job: JobSections) -> Plan:
        """Plan a job.

        Raises:
            InvalidConfig: its placement does not have each of its roles once, or roles of a group differ in
                replicas or ranks.
        """
        placed = place(job.placement, job.roles)
        return cls(tuple(_group(job, name, roles) for name, roles in placed.items()))

    @property
    def grouping(self) -> dict[str, tuple[str, ...]]:
        """Each group's roles, by its name."""
        return {group.name: group.roles for group in self.groups}

    @property
    def replicas(self) -> dict[str, PlannedGroup]:
        """Each replica's group, by the replica's name, in the order in which they start."""
        return {name: group for group in self.groups for name in group.replica_names}

    @property
    def num_devices(self) -> int:
        """Devices of all replicas."""
        return sum(group.replicas * group.devices for group in self.groups)

    def __getitem__(self, name: str) -> PlannedGroup:
        """Return the group of this name."""
        return next(group for group in self.groups if group.name == name)

    def of_role(self, role: str) -> PlannedGroup:
        """Return the group that has a role of the job."""
        return next(group for group in self.groups if role in group.roles)

    def only(self, roles: Sequence[str]) -> Plan:
        """Return the plan with these roles alone, in the places that they have in the whole job; empty: all."""
        if not roles:
            return self
        groups = (group.only(roles) for group in self.groups)
        return replace(self, groups=tuple(group for group in groups if group.roles))


def _group(job: JobSections, name: str, roles: tuple[str, ...]) -> PlannedGroup:
    models = tuple(role for role in roles if job.on_device(role))
    sections = [section for role in roles for section in sections_of(role)]
    group = PlannedGroup(
        name=name,
        roles=roles,
        models=models,
        replicas=num_replicas(job.placement, name, roles),
        ranks=num_ranks(job.placement, name, roles, models, job.trainer.world_size),
        engine_devices=job.rollout.tensor_model_parallel_size,
        texts=_unique(text for section in sections for text in _texts(value_at(job, section)) if "/" in text),
    )
    keys = [key for key in PATHS if any(f"{key}.".startswith(f"{section}.") for section in sections)]
    writes = [RUN_DIR] if group.is_trained or job.trainer.profile_steps else []
    shared = [RUN_DIR] if writes or len(roles) > 1 else []  # to write, or to offload
    resumed = [RESUME_DIR] if group.is_trained and job.trainer.resume_mode == "resume_path" else []
    weights = [WEIGHTS_DIR] if "rollout" in roles and not job.engine.on_device else []
    return replace(
        group,
        reads=_unique(path for key in (*keys, *shared, *resumed) for path in paths_at(job, key)),
        writes=(*writes, *weights),
    )


def paths_at(job: JobSections, key: str) -> tuple[str, ...]:
    """Return the paths of a key, as the job gives them; none if it is not set."""
    value = job.given_run_dir if key == RUN_DIR else value_at(job, key)
    return tuple(filter(None, _texts(value)))


def _unique(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value, also those that are keys."""
    if isinstance(value, Config):
        value = value.model_dump(mode="json")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from (str(key), *_texts(below))
    elif isinstance(value, Iterable):
        for below in value:
            yield from _texts(below)
