"""Checks values of the chart rlhf-job without Helm and without a cluster.

The chart's schema has most of what `helm install` refuses, and the job inside is checked as a job file is. Most
of what templates refuse is left to Helm (docs/kubernetes-guarantees.md lists it).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match

from rolemesh.config.base import merge
from rolemesh.config.job import JobConfig, make_job
from rolemesh.config.placement import strategies
from rolemesh.config.yaml_file import one_line, read_yaml
from rolemesh.errors import InvalidConfig

CHART = Path(__file__).parents[1] / "chart"
OF_JOB = ("job", "placement")


def are_values(sections: Mapping[str, Any]) -> bool:
    """Return whether the content of YAML files is of the chart.

    It has a section that no job file has; or only placement and plugins, which is a list in a job file.
    """
    values, job = _schema()["properties"].keys(), JobConfig.model_fields.keys()
    if sections.keys() & (values - job):
        return True
    of_both = bool(sections) and sections.keys() <= values & job
    return of_both and isinstance(sections.get("plugins", {}), Mapping)


def absent_plugins(given: Mapping[str, Any]) -> list[str]:
    """Return the job's plug-ins that are not on this machine: those of a ConfigMap, a claim or the image."""
    job = given.get("job")
    listed = job.get("plugins") if isinstance(job, Mapping) else None
    names = listed if isinstance(listed, list) else [listed]
    return [name for name in names if isinstance(name, str) and not _is_here(name)]


def _is_here(plugin: str) -> bool:
    if plugin.endswith(".py"):
        return Path(plugin).is_file()
    package = plugin.partition(".")[0]
    # What is no name of a module is left to the import, whose error says so; find_spec fails for __main__.
    return not package.isidentifier() or package in sys.modules or find_spec(package) is not None


def check_values(given: Mapping[str, Any]) -> tuple[list[str], JobConfig | None]:
    """Check values of the chart; by its schema alone if the job has absent plug-ins.

    Args:
        given: the content of the user's files.

    Returns:
        What is wrong, a sentence each; and the job, if that can be read.
    """
    values = _with_defaults(read_yaml(CHART / "values.yaml"), given)
    validator = jsonschema.Draft202012Validator(_schema())
    errors = sorted(map(_cause, validator.iter_errors(values)), key=lambda error: error.json_path)
    try:
        job = _job_in(values)
    except InvalidConfig as error:
        found = list(error.findings or [str(error)])
        return [*found, *(_said(each) for each in errors if not _is_among(each, found))], None
    if job and not errors:
        return _unknown_names(values, job), job
    return [*map(_said, errors)], job


def _job_in(values: Mapping[str, Any]) -> JobConfig | None:
    """Return the job as a pod reads it; None if it is no section, or has absent plug-ins.

    Raises:
        InvalidConfig: as make_job.
    """
    if not all(isinstance(values.get(section, {}), Mapping) for section in (*OF_JOB, "plugins")):
        return None
    if absent_plugins(values):
        return None
    sections = {**values.get("job", {}), "placement": values.get("placement", {})}
    with TemporaryDirectory() as folder:
        code = values.get("plugins", {}).get("code")
        listed = sections.get("plugins") or []
        if code and isinstance(code, str) and isinstance(listed, list):
            file = Path(folder) / "plugins.py"
            file.write_text(code, encoding="utf-8")
            sections["plugins"] = [*listed, str(file)]
        return make_job(sections)


def _unknown_names(values: Mapping[str, Any], job: JobConfig) -> list[str]:
    """Return which values are of groups that the job does not have, as templates say it."""
    strategy = job.placement.strategy
    groups = sorted(strategies()[strategy] or job.placement.groups)
    components = sorted(["controller", *job.plan.grouping])
    return [
        *(
            f"groups.{name} is set, but placement.strategy {strategy} has the groups {', '.join(groups)}: use "
            "one of these names"
            for name in values.get("groups", ())
            if name not in groups
        ),
        *(
            f"tls.secrets.{name} is set, but the components are {', '.join(components)}: use one of these names"
            for name in values.get("tls", {}).get("secrets", ())
            if name not in components
        ),
    ]


@cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return schema


def _with_defaults(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values over the chart's, as Helm does: a null takes a default out."""
    merged = merge(defaults, given)
    for key, value in given.items():
        if value is None and key in defaults:
            del merged[key]
        elif isinstance(value, Mapping) and isinstance(below := defaults.get(key), Mapping):
            merged[key] = _with_defaults(below, value)
    return merged


def _cause(error: jsonschema.ValidationError) -> jsonschema.ValidationError:
    """Return what is wrong within a value that fits none of several types: the rule that it breaks, if any.

    Otherwise, if it is text, the pattern that it does not match.
    """
    below = [*map(_cause, error.context or ())]
    patterns = [each for each in below if each.validator == "pattern"]
    found = [*filter(_is_rule, below), *patterns]
    return found[0] if found else best_match([error]) or error


def _is_rule(error: jsonschema.ValidationError) -> bool:
    """Return whether a sentence of a rule of the schema (helm_values/rules.py) is what is wrong."""
    path: Sequence[Any] = error.absolute_schema_path
    return bool(error.validator == "const" and path[-2] == "then")


def _is_among(error: jsonschema.ValidationError, found: Sequence[str]) -> bool:
    """Return whether an error of the schema is among what the check of the job found, whose words are better.

    It finds every error in its sections but rules. A rule is among them if a sentence names one of its keys.
    """
    about = ".".join(map(str, error.absolute_path)) or (str(error.validator_value) if _is_rule(error) else "")
    if re.split(r"\W", about)[0] not in OF_JOB:
        return False
    keys = {key.removeprefix("job.") for key in re.findall(r"\b(?:job|placement)\.[\w.]*\w", about)}
    named = {word for sentence in found for word in re.findall(r"[\w.]*\w", sentence)}
    return not _is_rule(error) or not keys.isdisjoint(named)


def _said(error: jsonschema.ValidationError) -> str:
    where = ".".join(map(str, error.absolute_path))
    if not _is_rule(error):
        return one_line(f"{where}: {error.message}" if where else error.message)
    sentence = str(error.validator_value)
    if not where:
        return sentence
    if isinstance(error.instance, Mapping):
        return f"{where}: {sentence}"
    return one_line(f"{where} is {error.instance!r:.200}; expected {sentence}")
