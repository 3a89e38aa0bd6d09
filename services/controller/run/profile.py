"""Writes the timeline of the steps in trainer.profile_steps."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.home import Home
from rolemesh.telemetry import timeline

log = logging.getLogger(__name__)


def check_profile_steps(job: JobConfig) -> None:
    """Raise InvalidConfig if a profiled step lies beyond the last step."""
    last = job.trainer.total_training_steps
    steps = job.trainer.profile_steps
    assert last is not None
    if beyond := [step for step in steps if step > last]:
        raise InvalidConfig(
            f"trainer.profile_steps names step {beyond[0]}, but the job has {last} steps "
            "(trainer.total_training_steps, or trainer.total_epochs)"
        )


@contextmanager
def profiled(number: int, job: JobConfig) -> Iterator[None]:
    """Wrap one step. Write its timeline to profile/step_<n>/timeline.json if the step is profiled."""
    if number not in job.trainer.profile_steps:
        yield
        return
    written: list[timeline.TimedCall] = []
    token = timeline.calls.set(written)
    step = timeline.TimedCall(timeline.CONTROLLER, f"step {number}", time.perf_counter())
    try:
        yield
    finally:
        timeline.calls.reset(token)
    step.ended = time.perf_counter()
    where = job.profile_dir(number)
    text = json.dumps(timeline.to_chrome(written, step))
    try:
        with Home.of(job).writing(where) as directory:
            (directory / "timeline.json").write_text(text + "\n")
    except OSError as error:  # the step itself has been made
        log.warning("the timeline %s/timeline.json was not written: %s", where, error)
