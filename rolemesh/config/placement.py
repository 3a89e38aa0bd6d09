"""The section placement: which roles share a process and its device.

A strategy is a table from groups to roles, in a file of rolemesh/placements/. No code knows a strategy's name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from rolemesh.catalog.role_specs import ROLES, stateless_roles
from rolemesh.config.base import Config
from rolemesh.config.key_facts import FREE, Key
from rolemesh.config.yaml_file import read_yaml
from rolemesh.errors import InvalidConfig

TABLES = Path(__file__).parents[1] / "placements"
# A DNS label, short enough to add a job's name before it and a pod's number after it.
GROUP_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,22}[a-z0-9])?")

Groups = Mapping[str, Sequence[str]]


def _of_stateless_roles(given: dict[str, int]) -> dict[str, int]:
    """Return the replicas of every stateless role, 1 by default."""
    roles = stateless_roles()
    if unknown := [role for role in given if role not in roles]:
        why = "is trained, so it has exactly one replica" if unknown[0] in ROLES else "is not a role"
        raise ValueError(f"{unknown[0]} {why}; roles with replicas are {', '.join(roles)}")
    return {role: given.get(role, 1) for role in roles}


def _replicas_schema() -> dict[str, Any]:
    number = {"type": "integer", "exclusiveMinimum": 0, "default": 1}
    properties = dict.fromkeys(stateless_roles(), number)
    return {"type": "object", "additionalProperties": False, "properties": properties}


Replicas = Annotated[
    dict[str, Annotated[int, Field(gt=0)]],
    AfterValidator(_of_stateless_roles),
    WithJsonSchema(_replicas_schema()),
]


class PlacementConfig(Config):
    strategy: str = Key(
        "standalone",
        FREE,
        description="which roles share a device, a table in rolemesh/placements; standalone: each role has its "
        "own; "
        "custom: groups",
    )
    groups: dict[str, list[str]] = Key({}, FREE, description="custom: the roles of each group, by its name")
    replicas: Replicas = Key(
        {},
        FREE,
        description="number of processes of each stateless role, equal for all roles of a group; 1 by default",
    )
    ranks: dict[str, Annotated[int, Field(gt=0)]] = Key(
        {},
        FREE,
        description="number of processes, each with a device of its own, over which the models of a group (or "
        "of a role that is alone in its group) are spread; 1 by default",
    )
    launcher: Literal["processes", "ray"] = Key(
        "processes",
        FREE,
        description="what starts the ranks of a group that has several; ray: Ray, on this machine or in the "
        "cluster of the environment's RAY_ADDRESS",
    )


def strategies() -> dict[str, Groups]:
    """Return every strategy with its table. The table of `custom`, which uses the job's groups, is empty."""
    return {path.stem: _table(path) for path in sorted(TABLES.glob("*.yaml"))}


@cache
def _table(path: Path) -> Groups:
    groups: Groups = read_yaml(path)["groups"]
    return groups


def place(placement: PlacementConfig, roles: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the groups of a job: name to roles, in the table's order.

    Roles that the job does not have are left out, and so are groups without a role.

    Args:
        placement: the job's section.
        roles: the job's roles.

    Raises:
        InvalidConfig: the strategy or a role is unknown; a role is in no group or in two; a group has an
            invalid name; or the roles of a group differ in replicas.
    """
    known = strategies()
    if placement.strategy not in known:
        near = difflib.get_close_matches(placement.strategy, known, n=1)
        raise InvalidConfig(
            f"placement.strategy is {placement.strategy!r}; expected one of {', '.join(known)}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    table = known[placement.strategy]
    where = f"placement.strategy {placement.strategy}"
    if placement.groups and table:
        own = ", ".join(name for name, groups in known.items() if not groups)
        raise InvalidConfig(
            f"placement.groups is set, but {where} has its own groups; set placement.strategy to {own}"
        )
    if not table:
        table = placement.groups
        where = "placement.groups"
    _check(table, roles, where)
    groups = {name: tuple(role for role in members if role in roles) for name, members in table.items()}
    groups = {name: members for name, members in groups.items() if members}
    for name, members in groups.items():
        num_replicas(placement, name, members)
    for name in placement.ranks:
        if name not in table and name not in ROLES:
            near = difflib.get_close_matches(name, [*table, *ROLES], n=1)
            raise InvalidConfig(
                f"placement.ranks names {name!r}, which is no group and no role; groups are {', '.join(table)}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
    return groups


def _check(table: Groups, roles: Sequence[str], where: str) -> None:
    for name in table:
        if not GROUP_NAME.fullmatch(name):
            raise InvalidConfig(
                f"{where}: expected a group's name of at most 24 lower-case letters, digits and '-'; got "
                f"{name!r}"
            )
    listed = [(role, name) for name, members in table.items() for role in members]
    if unknown := [f"{role!r} (in {name})" for role, name in listed if role not in ROLES]:
        raise InvalidConfig(f"{where}: unknown role {', '.join(unknown)}; roles are {', '.join(ROLES)}")
    for role in ROLES:
        homes = [name for other, name in listed if other == role]
        if len(homes) > 1:
            raise InvalidConfig(
                f"{where}: {role} is listed {len(homes)} times ({', '.join(homes)}); list it once"
            )
        if not homes and role in roles:
            raise InvalidConfig(f"{where}: no group has {role}, which this job needs; add it to a group")


def num_replicas(placement: PlacementConfig, group: str, roles: Sequence[str]) -> int:
    """Return the number of processes of a group.

    Raises:
        InvalidConfig: its roles differ in replicas, but each process has all roles of its group.
    """
    counts = {role: placement.replicas.get(role, 1) for role in roles}
    if len(set(counts.values())) > 1:
        most = max(counts, key=lambda role: counts[role])
        fewer = ", ".join(f"{role} {count}" for role, count in counts.items() if count < counts[most])
        raise InvalidConfig(
            f"placement.replicas.{most} is {counts[most]}, but its group {group} has roles with fewer replicas "
            f"({fewer}; a trained role has one); give {most} its own group, or all of them equally many"
        )
    return next(iter(counts.values()))


def takes_world_size(on_device: Iterable[str]) -> bool:
    """Return whether a group with these roles on a device has as many ranks as trainer.n_gpus_per_node says."""
    return bool({*on_device} - {"rollout"})


def num_ranks(
    placement: PlacementConfig,
    group: str,
    roles: Sequence[str],
    on_device: Sequence[str],
    world_size: int | None = None,
) -> int:
    """Return the number of ranks of a group: processes over which its models are spread.

    Args:
        placement: the job's section.
        group: its name.
        roles: its roles.
        on_device: those that compute on a device. Rank 0 alone has the others.
        world_size: trainer.n_gpus_per_node times trainer.nnodes: the ranks of a group that placement.ranks does
            not name; None: 1.

    Raises:
        InvalidConfig: its roles differ in ranks, or it cannot have several.
    """
    named = {name: placement.ranks[name] for name in (group, *roles) if name in placement.ranks}
    if world_size is not None and takes_world_size(on_device):
        for name, count in named.items():
            if count != world_size:
                raise InvalidConfig(
                    f"placement.ranks.{name} is {count}, but trainer.n_gpus_per_node times trainer.nnodes is "
                    f"{world_size}; set one of them, or both to the same number"
                )
        named = {group: world_size} | named
    for name, count in named.items():
        if count > 1 and name not in on_device and (name != group or not on_device):
            raise InvalidConfig(
                f"placement.ranks.{name} is {count}, but {name} has no model on a device that could be spread; "
                "leave it out"
            )
    counts = {role: named.get(role, named.get(group, 1)) for role in on_device}
    if len({*counts.values(), named.get(group, max(counts.values(), default=1))}) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in (named | counts).items())
        raise InvalidConfig(
            f"placement.ranks differ in group {group} ({listed}), but each rank has all roles of its group; "
            f"set placement.ranks.{group} alone, or give the roles groups of their own (placement.strategy)"
        )
    count = max(counts.values(), default=1)
    if count > 1 and list(on_device) == ["rollout"]:
        raise InvalidConfig(
            f"placement.ranks is {count} for group {group}, which has the rollout alone; set "
            "placement.replicas.rollout for more engines, or rollout.tensor_model_parallel_size for an engine "
            "on several GPUs"
        )
    return count
