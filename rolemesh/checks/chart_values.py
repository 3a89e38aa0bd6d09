"""Checks values of the chart rlhf-job without Helm and without a cluster.

The chart's schema has most of what `helm install` refuses, and the job inside is checked as a job file is. What
only templates can see is left: GPUs of pods against ranks, paths against claims, and what a cluster lacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match

from rolemesh.config.base import merge
from rolemesh.config.job import JobConfig, make_job
from rolemesh.config.yaml_file import one_line, read_yaml
from rolemesh.errors import InvalidConfig

CHART = Path(__file__).parents[1] / "chart"
OF_JOB = ("job", "placement")


def are_values(sections: Mapping[str, Any]) -> bool:
    """Return whether the content of YAML files is of the chart: it has a section that no job file has."""
    return not sections.keys().isdisjoint(_schema()["properties"].keys() - JobConfig.model_fields.keys())


def check_values(given: Mapping[str, Any]) -> tuple[list[str], JobConfig | None]:
    """Check values of the chart.

    Args:
        given: the content of the user's files.

    Returns:
        What is wrong, a sentence each; and the job, if that can be read.
    """
    values = _with_defaults(read_yaml(CHART / "values.yaml"), given)
    validator = jsonschema.Draft202012Validator(_schema())
    errors = sorted(map(_cause, validator.iter_errors(values)), key=lambda error: error.json_path)
    job = None
    try:
        job = _job_in(values)
    except InvalidConfig as error:
        # The job file's own words are better, so the schema's of the same sections are left out.
        others = [_said(each) for each in errors if not _is_of_job(each)]
        return [*(error.findings or [str(error)]), *others], None
    return [*map(_said, errors)], job


def _job_in(values: Mapping[str, Any]) -> JobConfig | None:
    """Return the job as a pod reads it; None if it is no section.

    Raises:
        InvalidConfig: as make_job.
    """
    if not all(isinstance(values.get(section, {}), Mapping) for section in (*OF_JOB, "plugins")):
        return None
    sections = {**values.get("job", {}), "placement": values.get("placement", {})}
    with TemporaryDirectory() as folder:
        if code := values.get("plugins", {}).get("code"):
            file = Path(folder) / "plugins.py"
            file.write_text(code, encoding="utf-8")
            sections["plugins"] = [*sections.get("plugins", ()), str(file)]
        return make_job(sections)


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
    """Return what is wrong within a value that fits none of several types: the rule that it breaks, if any."""
    rules = [below for below in map(_cause, error.context or ()) if _is_rule(below)]
    return rules[0] if rules else best_match([error]) or error


def _is_rule(error: jsonschema.ValidationError) -> bool:
    """Return whether a sentence of a rule of the schema (helm_values/rules.py) is what is wrong."""
    path: Sequence[Any] = error.absolute_schema_path
    return bool(error.validator == "const" and path[-2] == "then")


def _is_of_job(error: jsonschema.ValidationError) -> bool:
    if error.absolute_path:
        return error.absolute_path[0] in OF_JOB
    return _is_rule(error) and str(error.validator_value).partition(".")[0] in OF_JOB


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
