"""The tables of the chart: what Python knows of a job, for templates to look up.

No template decides which roles a job has. For each role the table has alternatives, and the role is in the job
if one of them holds: if each of its keys has one of the listed values. The alternatives are found by asking
JobSections for every combination of the keys, so a change of its code changes the table.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.catalog.engines import ENGINES
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.role_specs import ROLES
from rolemesh.config import JobConfig
from rolemesh.config.base import Config
from rolemesh.config.job_sections import JobSections
from rolemesh.config.plan import DUMPS, PATHS, RESUME_DIR, RUN_DIR, WEIGHTS_DIR, sections_of
from rolemesh.planner.device_specs import GIB
from rolemesh.planner.host_memory import HF_BYTES, RANK_BYTES, VLLM_BYTES

Alternatives = list[dict[str, list[Any]]]
Row = tuple[frozenset[Any], ...]  # the values of each key

OTHER = ""  # any value that a key's list does not name, such as the name of a plug-in's part
# The keys that decide which roles a job has, and which of them compute on a device, with their values. That of
# OTHER is what the chart takes it for: it cannot read a plug-in.
DECIDING: Mapping[str, Mapping[Any, Any]] = {
    "algorithm.page": {None: None} | {name: name for name in PAGES} | {OTHER: "grpo"},
    "algorithm.adv_estimator": {name: name for name in ESTIMATORS} | {OTHER: "grpo"},
    "algorithm.filter_groups.enable": {False: False, True: True},
    "algorithm.use_kl_in_reward": {False: False, True: True},
    "actor.use_kl_loss": {False: False, True: True},
    "actor.model.lora_rank": {0: 0, OTHER: 8},
    "critic.enable": {None: None, False: False, True: True},
    "rollout.multi_turn.enable": {False: False, True: True},
}
COMPUTING: Mapping[str, Mapping[Any, Any]] = {
    "rollout.name": {name: name for name in ENGINES} | {OTHER: "vllm"},
    "reward.reward_model.enable": {False: False, True: True},
}


def tables() -> str:
    """Return the tables, and the default of each key of a job file, as JSON."""
    content = {
        "roles": list(ROLES),
        "trained": [name for name, role in ROLES.items() if role.trained],
        "servesWeights": [name for name, role in ROLES.items() if role.serves_weights],
        "runsUserCode": [name for name, role in ROLES.items() if role.runs_user_code],
        "values": {
            key: [value for value in values if value != OTHER]
            for key, values in {**DECIDING, **COMPUTING}.items()
        },
        "inJob": alternatives(DECIDING, {name: role.is_in for name, role in ROLES.items()}),
        "onDevice": alternatives(COMPUTING, {name: role.on_device for name, role in ROLES.items()}),
        "reads": {name: list(sections_of(name)) for name in ROLES},
        "paths": list(PATHS),
        "runDir": RUN_DIR,
        "dumps": list(DUMPS),
        "resumeDir": RESUME_DIR,
        "weightsDir": WEIGHTS_DIR,
        "inDtype": [name for name, engine in ENGINES.items() if engine.reserves_memory],
        "hostGiB": {
            name: size // GIB for name, size in (("vllm", VLLM_BYTES), ("perGpu", RANK_BYTES), ("hf", HF_BYTES))
        },
        "ray": ray_version(),
        "job": JobConfig().model_dump(mode="json", exclude={"placement"}),
    }
    return json.dumps(content, indent=1) + "\n"


def alternatives(
    keys: Mapping[str, Mapping[Any, Any]], asked: Mapping[str, Callable[[JobSections], bool]]
) -> dict[str, Alternatives]:
    """Return when each thing holds for a job: in each alternative, the values that keys have. No key: always.

    Args:
        keys: those that may decide it, each with its values, and with what each is taken for.
        asked: for every combination of values, by the thing's name.
    """
    true: dict[str, set[Row]] = {name: set() for name in asked}
    for combination, job in _combinations(keys):
        row = tuple(frozenset([value]) for value in combination)
        for name, holds in asked.items():
            if holds(job):
                true[name].add(row)
    return {name: [_named(keys, row) for row in _sorted(keys, _merged(rows))] for name, rows in true.items()}


def _combinations(keys: Mapping[str, Mapping[Any, Any]]) -> Iterator[tuple[tuple[Any, ...], JobSections]]:
    """Yield every combination of values with its job, whose sections are not checked against each other."""
    jobs: list[tuple[tuple[Any, ...], Config]] = [((), JobSections())]
    for key, values in keys.items():
        jobs = [
            ((*so_far, name), _with(job, key.split("."), value))
            for so_far, job in jobs
            for name, value in values.items()
        ]
    for combination, job in jobs:
        assert isinstance(job, JobSections)
        yield combination, job


def _with(section: Config, path: Sequence[str], value: Any) -> Config:
    first, *rest = path
    below = _with(getattr(section, first), rest, value) if rest else value
    return section.model_copy(update={first: below})


def _merged(rows: set[Row]) -> set[Row]:
    """Join rows that differ in one place alone, until there are none."""
    while True:
        joined = rows
        for place in range(len(next(iter(rows), ()))):
            alike: dict[Any, frozenset[Any]] = defaultdict(frozenset)
            for row in joined:
                alike[row[:place], row[place + 1 :]] |= row[place]
            joined = {(*before, values, *after) for (before, after), values in alike.items()}
        if joined == rows:
            return rows
        rows = joined


def _sorted(keys: Mapping[str, Mapping[Any, Any]], rows: set[Row]) -> list[Row]:
    def order(row: Row) -> list[list[int]]:
        return [
            [at for at, value in enumerate(values) if value in given]
            for values, given in zip(keys.values(), row, strict=True)
        ]

    return sorted(rows, key=order)


def _named(keys: Mapping[str, Mapping[Any, Any]], row: Row) -> dict[str, list[Any]]:
    """Return a row's keys with their values, without keys that may have any."""
    found = (
        (key, [value for value in keys[key] if value in given]) for key, given in zip(keys, row, strict=True)
    )
    return {key: values for key, values in found if len(values) < len(keys[key])}


def ray_version() -> str:
    """Return the version of Ray that the image has: the extra's."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    extras = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (requirement,) = extras["ray"]
    return str(requirement.partition("==")[2])
