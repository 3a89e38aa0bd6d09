"""The chart's tables say what Python says of any job, and name every key that decides on its roles."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, get_args

import pytest

from helm_values.tables import COMPUTING, DECIDING, OTHER, alternatives, tables
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.plugin_imports import NAMED
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config.base import Config, leaves, value_at
from rolemesh.config.job_sections import JobSections

TABLES = json.loads(tables())


def with_value(section: Config, key: str, value: Any) -> Any:
    first, _, rest = key.partition(".")
    below = with_value(getattr(section, first), rest, value) if rest else value
    return section.model_copy(update={first: below})


def holds(table: str, role: str, values: Mapping[str, Any]) -> bool:
    """What _plan.tpl makes of a table."""
    return any(all(values[key] in found for key, found in each.items()) for each in TABLES[table][role])


@pytest.mark.parametrize("seed", range(200))
def test_the_tables_say_what_python_says_of_a_drawn_job(seed: int) -> None:
    draw = random.Random(seed)
    values = {key: draw.choice(list(known)) for key, known in (DECIDING | COMPUTING).items()}
    job = JobSections()
    for key, value in values.items():
        job = with_value(job, key, (DECIDING | COMPUTING)[key][value])
    assert [role for role in ROLES if holds("inJob", role, values)] == list(job.roles)
    assert [role for role in ROLES if holds("onDevice", role, values)] == [
        role for role in ROLES if job.on_device(role)
    ]


def others(job: JobSections, key: str) -> list[Any]:
    """Other values of a key: of a switch, a choice, a number, a text, or a name in a catalog."""
    *path, leaf = key.split(".")
    section = value_at(job, ".".join(path)) if path else job
    assert isinstance(section, Config)
    value, choices = getattr(section, leaf), get_args(type(section).model_fields[leaf].annotation)
    if key in NAMED:
        return [[name] if isinstance(value, tuple) else name for name in NAMED[key] if name != value]
    if isinstance(value, bool) or bool in choices:
        return [True, False]
    if isinstance(value, int | float):
        return [value + 1]
    if named := [choice for choice in choices if isinstance(choice, str) and choice != value]:
        return named
    return ["other"] if isinstance(value, str) or str in choices else [1] if int in choices else []


def test_no_other_key_decides_on_the_roles_of_a_job() -> None:
    """If this fails, name the key in helm_values/tables.py, or take it out there.

    Filtered groups change the page of an estimator, but to one with the same roles.
    """
    found = set()
    for page in (None, *PAGES):
        job = with_value(JobSections(), "algorithm.page", page)
        facts = (job.roles, [job.on_device(role) for role in ROLES])
        for key in leaves(JobSections):
            for value in others(job, key):
                other = with_value(job, key, value)
                if facts != (other.roles, [other.on_device(role) for role in ROLES]):
                    found.add(key)
    assert found | {"algorithm.filter_groups.enable"} == DECIDING.keys() | COMPUTING.keys()


def test_alternatives_leave_out_keys_that_decide_nothing() -> None:
    keys = {"rollout.n": {1: 1, OTHER: 2}, "actor.use_kl_loss": {False: False, True: True}}
    assert alternatives(keys, {"a": lambda job: job.actor.use_kl_loss}) == {
        "a": [{"actor.use_kl_loss": [True]}]
    }
    assert alternatives(keys, {"a": lambda job: True, "b": lambda job: False}) == {"a": [{}], "b": []}
    either = alternatives(keys, {"a": lambda job: job.actor.use_kl_loss or job.rollout.n == 1})["a"]
    assert len(either) == 2
