"""Loads the training and validation rows of a run, by its page."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset, PromptOrder
from rolemesh.data.dataset import Agents
from rolemesh.data.pairs import PairDataset
from rolemesh.data.supervised import SupervisedDataset
from rolemesh.errors import InvalidConfig
from rolemesh.services.controller.run.best import check_reportable
from rolemesh.services.controller.run.profile import check_profile_steps

logger = logging.getLogger(__name__)

Dataset = PromptDataset | SupervisedDataset | PairDataset


def training_data(job: JobConfig, tokenizer: Any, agents: Agents | None) -> tuple[Dataset, PromptOrder, int]:
    """Return the training rows, their order, and the number of steps.

    Raises:
        InvalidConfig, InvalidData: there are none, or they cannot be used.
    """
    if job.data.source.reads_files and not job.data.train_files:
        raise InvalidConfig("data.train_files is empty; expected one Parquet file or more")
    data = _dataset(job, job.data.train_files, "train", tokenizer, agents)
    return data, PromptOrder(len(data), job.data), num_steps(job, len(data))


def warn_of_unseen_rows(job: JobConfig, num_rows: int) -> None:
    """Log a warning if epochs leave out some training rows, because the last batch would not be full."""
    if job.trainer.val_only or job.trainer.total_training_steps is not None:
        return
    steps = num_steps(job, num_rows)
    batch_size = PromptOrder(num_rows, job.data).batch_size
    if (num_unseen := num_rows - steps * batch_size) > 0:
        logger.warning(
            "train: %d of %d rows are never seen: the number of steps is rounded down, to %d of %d rows; set "
            "trainer.total_training_steps to %d, or another data.train_batch_size",
            num_unseen,
            num_rows,
            steps,
            batch_size,
            steps + 1,
        )


def num_steps(job: JobConfig, num_rows: int) -> int:
    """Return how many steps the job makes with so many training rows."""
    trainer = job.trainer
    return trainer.total_training_steps or PromptOrder(num_rows, job.data).total_steps(trainer.total_epochs)


def with_total_steps(job: JobConfig, total_steps: int) -> JobConfig:
    """Return the job with its total number of steps set. Raise InvalidConfig if it profiles a later one."""
    trainer = job.trainer.model_copy(update={"total_training_steps": total_steps})
    job = job.model_copy(update={"trainer": trainer})
    check_profile_steps(job)
    return job


def validation_data(job: JobConfig, tokenizer: Any, agents: Agents | None) -> Dataset | None:
    """Return the validation rows; None if the job names no files for them and never validates.

    Raises:
        InvalidConfig, InvalidData: validation is wanted without data or a reward, its rows cannot be used, or
            it could not report trainer.save_best.
    """
    if job.validates and job.generates and "reward" not in job.roles:
        raise InvalidConfig(
            f"page {job.page.name} has no reward (its `roles`), so nothing could score a validation of "
            "data.val_files; set trainer.val_before_train to false and trainer.test_freq to -1, or name reward "
            "among the page's roles"
        )
    if job.validates or job.data.val_files:
        data = _dataset(job, job.data.val_files, "val", tokenizer, agents)
        if job.trainer.save_best and not job.trainer.val_only:
            cells = (cell for rows in data.batches(job.data.val_batch_size) for cell in rows["data_source"])
            check_reportable(job, sorted(set(cells)))
        return data
    if job.trainer.val_only or job.trainer.test_freq > 0:
        raise InvalidConfig(
            "trainer.val_only or trainer.test_freq requires validation, but data.val_files is empty"
        )
    return None


@dataclass(frozen=True)
class Content:
    """The content of a run's data sets, as arguments of `settings_to_keep`.

    Args:
        num_prompts: number of training rows.
        prompts: digest of their tokens.
        columns: digest of their other columns; None if training reads none.
        validation: digest of the validation rows; None without validation.
    """

    num_prompts: int
    prompts: str
    columns: str | None
    validation: str | None


def content_of(train: Dataset, val: Dataset | None) -> Content:
    """Return the content of the training and validation rows."""
    digests: tuple[str | None, ...] = (val.digest, val.columns_digest) if val else ()
    validation = "+".join(filter(None, digests)) or None
    return Content(len(train), train.digest, train.columns_digest, validation)


def _dataset(
    job: JobConfig, files: Sequence[str], split: Literal["train", "val"], tokenizer: Any, agents: Agents | None
) -> Dataset:
    if job.page.learns_from == "responses":
        return SupervisedDataset(files, job.data, tokenizer, split=split)
    if job.page.learns_from == "pairs":
        return PairDataset(files, job.data, tokenizer, split=split)
    # A page of a plug-in may score its rows by itself, though it has a reward by default.
    trains = not job.trainer.val_only and job.page.origin == BUILT_IN
    used = job.validates if split == "val" else trains
    reward = job.reward if used and "reward" in job.roles else None
    return PromptDataset(files, job.data, tokenizer, split=split, agents=agents, reward=reward)
