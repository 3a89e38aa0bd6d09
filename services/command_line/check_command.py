"""Implements `rolemesh check`: what is wrong with a job file, or with values of the chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

import rolemesh
from rolemesh.checks.chart_values import absent_plugins, are_values, check_values
from rolemesh.config.base import is_file, merge, parse_overrides
from rolemesh.config.job import make_job
from rolemesh.config.yaml_file import one_line, read_yaml
from rolemesh.errors import InvalidBatch, InvalidConfig


def wrong(config: Path, overrides: Sequence[str]) -> list[str]:
    """Return what is wrong with a job file or values of the chart, with overrides, a sentence each.

    What could not be checked is printed to stderr.
    """
    try:
        given = read_yaml(config)  # once, as it may be a pipe
        sections = merge(given, parse_overrides(overrides))
        if are_values(sections):
            found, job = check_values(sections)
            if absent := absent_plugins(sections):
                names = one_line(", ".join(absent))
                limit = "the job is not checked beyond the chart's schema"
                typer.echo(f"{config}: plug-ins not found here: {names}; {limit}", err=True)
        else:
            files = [str(config), *filter(is_file, overrides)]
            _refuse_wrong_order(given, files)
            found, job = [], make_job(sections, where=", ".join(files))
        if job and not found:
            rolemesh.step_graph(job)  # as the controller does before anything loads
    except InvalidConfig as error:
        return list(error.findings or [str(error)])
    except InvalidBatch as error:
        return [f"{config}: {error}"]
    return found


def _refuse_wrong_order(given: Mapping[str, Any], files: Sequence[str]) -> None:
    """Refuse files in the wrong order, as load_job does, which would read the first one again."""
    whole = next((file for file in files[1:] if "data" in read_yaml(Path(file))), None)
    if whole and not {"data", "trainer"} & given.keys():
        raise InvalidConfig(
            f"{files[0]} comes before {whole}, whose keys would override it; the job file comes first: {whole} "
            f"{files[0]}"
        )
