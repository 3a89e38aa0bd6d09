"""The job file: one YAML, one typed schema. One file per section; job.py puts them together and checks
what two sections must agree on. The schema lies in the library and not beside each service, because the
controller and the chart need all of it and services do not import each other."""

from rolemesh.config.base import Config, parse_overrides
from rolemesh.config.job import JobConfig, load_job

__all__ = ["Config", "JobConfig", "load_job", "parse_overrides"]
