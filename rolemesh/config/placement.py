"""placement: which roles share a process and its device. A strategy is a table from groups to roles, a file of
rolemesh/placements/; no code knows a strategy's name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from pydantic import Field

from rolemesh.config.base import Config
from rolemesh.config.yaml_file import read_yaml
from rolemesh.errors import InvalidConfig

ROLES = ("actor", "rollout", "reference", "critic", "reward")
TABLES = Path(__file__).parents[1] / "placements"
# A DNS label, with room for a job's name before it and a pod's number after.
GROUP_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")

Groups = Mapping[str, Sequence[str]]


class ReplicasConfig(Config):
    rollout: int = Field(1, gt=0)
    reference: int = Field(1, gt=0)
    reward: int = Field(1, gt=0)


class PlacementConfig(Config):
    strategy: str = Field(
        "standalone", description="a table of rolemesh/placements: which roles share a device"
    )
    groups: dict[str, list[str]] = Field({}, description="group to roles, for strategy custom")
    replicas: ReplicasConfig = Field(
        ReplicasConfig(), description="processes of each stateless role, the same for all roles of a group"
    )


def strategies() -> dict[str, Groups]:
    """Every strategy and its table, which is empty for the one that takes the job's own."""
    return {path.stem: _table(path) for path in sorted(TABLES.glob("*.yaml"))}


@cache
def _table(path: Path) -> Groups:
    groups: Groups = read_yaml(path)["groups"]
    return groups


def place(placement: PlacementConfig, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The groups of a job: name to roles, in the table's order. Roles that the job does not have are left out,
    and groups that have none left.

    Args:
        placement: the job's section.
        roles: that the job has.

    Raises:
        InvalidConfig: no such strategy; a role is unknown, in no group or in two; replicas that cannot be.
    """
    known = strategies()
    if placement.strategy not in known:
        near = difflib.get_close_matches(placement.strategy, known, n=1)
        raise InvalidConfig(
            f"placement.strategy is {placement.strategy!r}; there are {', '.join(known)}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    table, where = known[placement.strategy], f"placement.strategy {placement.strategy}"
    if placement.groups and table:
        own = ", ".join(name for name, groups in known.items() if not groups)
        raise InvalidConfig(f"placement.groups is set, and {where} has groups of its own; set it to {own}")
    if not table:
        table, where = placement.groups, "placement.groups"
    _check(table, roles, where)
    groups = {name: tuple(role for role in members if role in roles) for name, members in table.items()}
    groups = {name: members for name, members in groups.items() if members}
    for name, members in groups.items():
        num_replicas(placement, name, members)
    return groups


def _check(table: Groups, roles: Sequence[str], where: str) -> None:
    for name in table:
        if not GROUP_NAME.fullmatch(name):
            raise InvalidConfig(
                f"{where}: a group's name is of small letters, digits and '-', 24 at most; got {name!r}"
            )
    listed = [(role, name) for name, members in table.items() for role in members]
    if unknown := [f"{role!r} (in {name})" for role, name in listed if role not in ROLES]:
        raise InvalidConfig(f"{where} has no such role: {', '.join(unknown)}; roles are {', '.join(ROLES)}")
    for role in ROLES:
        homes = [name for other, name in listed if other == role]
        if len(homes) > 1:
            raise InvalidConfig(
                f"{where}: {role} is listed {len(homes)} times ({', '.join(homes)}); once is right"
            )
        if not homes and role in roles:
            raise InvalidConfig(f"{where}: no group has {role}, which this job needs; add it to one")


def num_replicas(placement: PlacementConfig, group: str, roles: Sequence[str]) -> int:
    """Processes of a group.

    Raises:
        InvalidConfig: its roles differ: a process has all the roles of its group.
    """
    counts = {role: getattr(placement.replicas, role, 1) for role in roles}
    if len(set(counts.values())) > 1:
        most = max(counts, key=lambda role: counts[role])
        fewer = ", ".join(f"{role} {count}" for role, count in counts.items() if count < counts[most])
        raise InvalidConfig(
            f"placement.replicas.{most} is {counts[most]}, and its group {group} has roles with fewer replicas "
            f"({fewer}; a role that is trained has one); give {most} a group of its own, or all of them as many"
        )
    return next(iter(counts.values()))
