"""Implements `rolemesh generate`: responds to the prompts of a file. Only the rollout role is started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from rolemesh.config import JobConfig
from rolemesh.config.cross_checks import equal_answers
from rolemesh.data import PromptDataset
from rolemesh.data.progress_bar import counting
from rolemesh.errors import InvalidConfig
from rolemesh.models.fetching import fetched
from rolemesh.models.loading import load_tokenizer, vocabulary_in
from rolemesh.roles import Rollout
from rolemesh.services.controller.offline.generation import generate
from rolemesh.services.controller.offline.generation_input import (
    check_output,
    check_role,
    read_input_rows,
    settings_of,
)
from rolemesh.services.controller.offline.parts import PROMPTS_PER_PART, Parts
from rolemesh.services.controller.run.run_dir import held
from rolemesh.services.processes.single_role import with_role


def generate_file(job: JobConfig, output: Path, *, log_probs: bool) -> None:
    """Write the rows of data.val_files with responses to `output`, or continue an interrupted command.

    Args:
        job: rollout.val_kwargs has the sampling parameters.
        output: a Parquet file.
        log_probs: also write each token's log-probability.

    Raises:
        RolemeshError: the job, the data or the output cannot be used, or a role failed. Parts are kept.
    """
    check_role(job, "rollout", "generate")
    if not job.data.has_validation:
        raise InvalidConfig("data.val_files is empty; set it to the file with the prompts")
    key = "rollout.val_kwargs"  # not checked yet if the job's runs do not validate
    if reason := job.rollout.raised_temperature(key) or equal_answers(job, key):
        raise InvalidConfig(reason)
    check_output(output, ".parquet")
    job = fetched(job)
    vocabulary_in(job.actor.model, "actor")
    tokenizer = load_tokenizer(job.actor.model)
    prompts = PromptDataset(job.data.val_files, job.data, tokenizer, split="val", scored=False)
    input_rows = read_input_rows(job, prompts, log_probs=log_probs)
    size = job.data.val_batch_size or PROMPTS_PER_PART
    parts = Parts(output, settings_of(job, prompts), len(prompts), size, log_probs)
    console = Console(stderr=True, highlight=False)
    if parts.is_complete():
        console.print(f"{output} is complete already", soft_wrap=True)
        return
    filling = "is being filled by another command; wait for its end, or name another --output"
    with held(parts.folder, filling, key="--output"):
        parts.begin()
        kept = parts.num_kept()
        if kept:
            console.print(f"{kept} of {len(prompts)} prompts are kept in {parts.folder}", soft_wrap=True)
        try:
            if parts.missing():
                n = job.rollout.val_kwargs.n
                with counting("responses", n * len(prompts), n * kept) as count:
                    asyncio.run(_generate(job, prompts, tokenizer, parts, count))
        except KeyboardInterrupt:
            kept = parts.num_kept()
            console.print(
                f"interrupted; {kept} of {len(prompts)} prompts are kept in {parts.folder}, and the same "
                "command goes on from there",
                soft_wrap=True,
            )
            raise
        parts.finish(input_rows)
    dropped = f" ({prompts.left_out})" if prompts.left_out else ""
    console.print(f"{output}: {len(prompts)} rows{dropped}", soft_wrap=True)


async def _generate(
    job: JobConfig, prompts: PromptDataset, tokenizer: Any, parts: Parts, count: Callable[[int], None]
) -> None:
    folder = str(parts.folder)  # a run of the same job may have its own run directory in use
    trainer = job.trainer.model_copy(update={"default_local_dir": folder})

    async def work(rollout: Rollout) -> None:
        await generate(prompts, rollout, job, parts, tokenizer, count)

    await with_role("rollout", job.model_copy(update={"trainer": trainer}), work)
