"""Implements `rolemesh evaluate`: scores the responses of a file. Only the reward role is started."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.config.rollout import ValSamplingConfig
from rolemesh.data.progress_bar import counting
from rolemesh.errors import InvalidConfig, RoleFailed, RolemeshError, RoleUnavailable
from rolemesh.models.fetching import fetched
from rolemesh.models.loading import load_tokenizer
from rolemesh.roles import Reward
from rolemesh.services.controller.display.table import log_console
from rolemesh.services.controller.offline.evaluation import Evaluation, evaluate
from rolemesh.services.controller.offline.generation_input import check_output, check_role
from rolemesh.services.controller.offline.responses import ResponseRows
from rolemesh.services.controller.run.durably import write_durably
from rolemesh.services.processes.single_role import with_role


def evaluate_file(job: JobConfig, output: Path | None, response_key: str) -> Evaluation:
    """Score the responses of data.val_files, print the metrics as a table, and write them to `output`.

    Args:
        job: its section `reward` determines the scores.
        output: a JSON file; None: only the table.
        response_key: the column with a list of responses in each row.

    Raises:
        RolemeshError: the job, the data or the output cannot be used, or a response could not be scored.
    """
    check_role(job, "reward", "evaluate")
    if not job.data.val_files:
        raise InvalidConfig("data.val_files is empty; set it to the file with the responses")
    if output:
        check_output(output, ".json")
    job = fetched(job)
    rows = ResponseRows(job, load_tokenizer(job.actor.model), response_key)
    folder = mkdtemp(prefix="rolemesh-evaluate-")
    with counting("scores", len(rows) * rows.n) as count:

        async def work(reward: Reward) -> Evaluation:
            return await evaluate(rows, reward, count)

        try:
            found = asyncio.run(with_role("reward", _with(job, rows.n, folder), work))
        except (RoleFailed, RoleUnavailable) as error:
            raise type(error)(f"{error} (logs of the role's processes: {folder}/logs)") from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    shutil.rmtree(folder, ignore_errors=True)
    console = log_console()
    console.print(found.table())
    if rows.left_out:
        console.print(f"{len(rows)} rows are evaluated ({rows.left_out})", soft_wrap=True)
    if output:
        try:
            write_durably(output, found.to_json())
        except OSError as error:
            raise RolemeshError(
                f"{output} cannot be written: {error.strerror or error}; the table above has the metrics"
            ) from error
    return found


def _with(job: JobConfig, n: int, folder: str) -> JobConfig:
    """Return the job of the reward role: the file's number of responses to a prompt, and this run directory.

    The role's process checks this job as that of a run. Nothing is generated, so `rollout.val_kwargs` describes
    responses that may differ, and not how the command's job would have sampled.
    """

    def changed(section: Any, **values: Any) -> Any:
        return section.model_copy(update=values)

    rollout = changed(job.rollout, val_kwargs=ValSamplingConfig(n=n, do_sample=True))
    trainer = changed(job.trainer, default_local_dir=folder)
    return job.model_copy(update={"rollout": rollout, "trainer": trainer})
