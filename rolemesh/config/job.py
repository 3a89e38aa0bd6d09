"""The whole job file, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from rolemesh.catalog.plugin_imports import load_plugins
from rolemesh.config.base import explain, is_file, merge, parse_overrides, path_keys
from rolemesh.config.cross_checks import check_sections
from rolemesh.config.job_sections import JobSections, Plugins
from rolemesh.config.plan import Plan
from rolemesh.config.rollout import MOST_OWN_ROWS
from rolemesh.config.unused_keys import UnusedKey, overruled_keys, without
from rolemesh.config.unused_keys import unused_keys as unused_keys_of
from rolemesh.config.yaml_file import read_texts, read_yaml, to_yaml, write_texts
from rolemesh.errors import InvalidConfig


class JobConfig(JobSections):
    """One job, from the YAML file, the command line's overrides, or the chart's value `job`."""

    @model_validator(mode="after")
    def _sections_agree(self) -> JobConfig:
        check_sections(self)
        return self

    @property
    def plan(self) -> Plan:
        """How the job is deployed: its groups of roles, with replicas, ranks, devices and paths."""
        return Plan.of(self)

    @property
    def rows_at_once(self) -> int:
        """Rows that one replica of the rollout decodes at once; each of its ranks has an engine.

        The caller may not know the GPU. If vLLM has one alone, it is assumed to be large.
        """
        group = self.plan.of_role("rollout")
        is_alone = self.trainer.device != "cpu" and group.models == ("rollout",)
        rows = self.rollout.with_rows_and_share(MOST_OWN_ROWS if is_alone else None).rows_at_once
        return rows * (group.ranks if "rollout" in group.models else 1)

    @property
    def has_own_device(self) -> bool:
        """True if no other role computes on the device of the rollout's engine, which then never sleeps."""
        return self.plan.of_role("rollout").models == ("rollout",)

    def unused_keys(self) -> tuple[UnusedKey, ...]:
        """Return the keys that have no effect in this job."""
        return tuple(unused_keys_of(self, overruled_keys(self)))

    def to_yaml(self) -> str:
        """Write the resolved job file: every key with its value.

        Keys without effect are included only if the job file sets them, so a run of the resolved file logs the
        same warnings. The exception is a value that a switch turns off: the resolved file also has the switch,
        so there is no warning (unused_keys.py). Nor does it have the two lengths that follow from
        data.max_length, so that this can be changed.
        """
        unset = {unused.key for unused in self.unused_keys() if not unused.is_set}
        if self.data.splits_max_length:
            unset |= {"data.max_prompt_length", "data.max_response_length"}
        sections = without(self.model_dump(mode="json"), unset)
        return to_yaml(write_texts(sections, PATHS))


# Keys with paths, and the one that names a folder.
PATHS = frozenset([*path_keys(JobConfig), "trainer.experiment_name"])


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Read a job file and apply overrides.

    Args:
        path: a YAML file.
        overrides: further YAML files, and `section.key=value` with the value in YAML (parse_overrides).

    Raises:
        InvalidConfig: a key or value is invalid; the message has each, its place and the nearest valid key.
            Also if the files are in the wrong order, or the file has the chart's values.
    """
    sections, where = read_sections(path, overrides)
    if isinstance(sections.get("job"), Mapping):
        raise InvalidConfig(
            f"{path} has the section job, so it is a values file of the chart rlhf-job. A job file has the "
            "content "
            "of that section at its top level, and the section placement beside it; make a file of these two"
        )
    return make_job(sections, where)


def read_sections(path: str | Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """Read a YAML file, once, as it may be a pipe, and apply overrides.

    Args:
        path, overrides: as for load_job.

    Returns:
        The sections, and the names of the files, for messages.

    Raises:
        InvalidConfig: a file is no YAML, or the files are in the wrong order.
    """
    given = read_yaml(Path(path))
    files = [str(path), *filter(is_file, overrides)]
    whole = next((file for file in files[1:] if "data" in read_yaml(Path(file))), None)
    if whole and not {"data", "trainer", "job"} & given.keys():
        raise InvalidConfig(
            f"{path} comes before {whole}, whose keys would override it; the job file comes first: {whole} "
            f"{path}"
        )
    return merge(given, parse_overrides(overrides)), ", ".join(files)


def make_job(data: dict[str, Any], where: str = "job") -> JobConfig:
    """Make a job from sections, after importing its plug-ins; error messages begin with `where`."""
    try:
        data = read_texts(data, PATHS)
        load_plugins(Plugins(plugins=data.get("plugins")).plugins)
        return JobConfig.model_validate(data)
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}: {error}") from error
    except ValidationError as error:
        raise explain(error, JobConfig, where) from error
