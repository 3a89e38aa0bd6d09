"""Searches for the best grouping of a job's roles.

Five roles can be grouped in 52 ways, so every grouping is tried. Devices can be divided in millions of ways, so
the division is greedy (`Planner.plan`). This is HybridFlow's mapping (arXiv:2409.19256, §6) over the placements
that Xiao et al. (arXiv:2312.11819) call flexible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rolemesh.planner.estimate import Estimate, Grouping, Planner, best_first


def partitions(roles: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield all ways to put roles into groups, each once."""
    if not roles:
        yield []
        return
    first, *others = roles
    for groups in partitions(others):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


def as_grouping(groups: Sequence[Sequence[str]]) -> Grouping:
    """Name each group: by its role, or `group-N` if it has several. The names are valid in a job file."""
    return {
        roles[0] if len(roles) == 1 else f"group-{place}": tuple(roles) for place, roles in enumerate(groups, 1)
    }


def search(planner: Planner, name: str = "custom") -> Estimate:
    """Return the best plan of all groupings. A role without a model needs no device and gets its own group."""
    modelled = [role for role in planner.job.roles if role in planner.shapes]
    rest = [[role] for role in planner.job.roles if role not in planner.shapes]
    plans = [planner.plan(name, as_grouping([*groups, *rest])) for groups in partitions(modelled)]
    return best_first(plans)[0]
