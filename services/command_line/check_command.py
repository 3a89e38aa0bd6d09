"""Implements `rolemesh check`: what is wrong with a job file, or with values of the chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import rolemesh
from rolemesh.checks.chart_values import are_values, check_values
from rolemesh.config.base import merge, parse_overrides
from rolemesh.config.job import load_job
from rolemesh.config.yaml_file import read_yaml
from rolemesh.errors import InvalidBatch, InvalidConfig


def wrong(config: Path, overrides: Sequence[str]) -> list[str]:
    """Return what is wrong with a job file or values of the chart, with overrides, a sentence each."""
    try:
        sections = merge(read_yaml(config), parse_overrides(overrides))
        if are_values(sections):
            found, job = check_values(sections)
        else:
            found, job = [], load_job(config, overrides)
        if job and not found:
            rolemesh.step_graph(job)  # as the controller does before anything loads
    except InvalidConfig as error:
        return list(error.findings or [str(error)])
    except InvalidBatch as error:
        return [f"{config}: {error}"]
    return found
