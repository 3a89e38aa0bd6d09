"""The job file: one YAML file with one typed schema.

There is one module per section. job_sections.py combines them, plan.py decides how a job is deployed,
cross_checks.py checks settings of several sections, and job.py makes the checked job. The schema is in the
library, not in each service, because the controller and the chart need all of it, and services do not import
each other.
"""

from rolemesh.config.base import Config, parse_overrides
from rolemesh.config.job import JobConfig, load_job

__all__ = ["Config", "JobConfig", "load_job", "parse_overrides"]
