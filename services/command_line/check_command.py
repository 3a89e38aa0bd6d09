"""Implements `rolemesh check`: what is wrong with a job file, or with values of the chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

import rolemesh
from rolemesh.checks.chart_values import absent_plugins, are_values, check_values
from rolemesh.config.job import make_job, read_sections
from rolemesh.config.yaml_file import one_line
from rolemesh.errors import InvalidBatch, InvalidConfig


def wrong(config: Path, overrides: Sequence[str]) -> list[str]:
    """Return what is wrong with a job file or values of the chart, with overrides, a sentence each.

    What could not be checked is printed to stderr.
    """
    try:
        sections, where = read_sections(config, overrides)
        if are_values(sections):
            found, job = check_values(sections)
            if absent := absent_plugins(sections):
                names = one_line(", ".join(absent))
                limit = "the job is not checked beyond the chart's schema"
                typer.echo(f"{config}: plug-ins not found here: {names}; {limit}", err=True)
        else:
            found, job = [], make_job(sections, where)
        if job and not found:
            rolemesh.step_graph(job)  # as the controller does before anything loads
    except InvalidConfig as error:
        return list(error.findings or [str(error)])
    except InvalidBatch as error:
        return [f"{config}: {error}"]
    return found
