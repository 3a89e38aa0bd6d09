"""The input of a generation: its prompts, all columns of their rows, and the settings that decide its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.config import JobConfig
from rolemesh.config.base import Config
from rolemesh.data import PromptDataset
from rolemesh.data.files import read_all_columns
from rolemesh.data.json_lines import table_of
from rolemesh.data.row_source import load_rows
from rolemesh.errors import InvalidConfig, InvalidData
from rolemesh.hub import data_file
from rolemesh.models.directory import described_directory
from rolemesh.services.controller.offline.generation import IDS, LOG_PROBS, RESPONSES

# Keys of data that no generation reads.
TRAINING = {"train_files", "train_batch_size", "gen_batch_size", "train_max_samples", "val_batch_size"}


def check_role(job: JobConfig, role: str, command: str) -> None:
    """Raise InvalidConfig if the job lacks the role, or asks for something that the command cannot do."""
    if role not in job.roles:
        raise InvalidConfig(
            f"rolemesh {command} starts the {role} alone, but algorithm.page {job.page.name} has none; set "
            "algorithm.page=grpo"
        )
    if job.rollout.multi_turn.enable:
        raise InvalidConfig(
            f"rolemesh {command} has rows of one turn, but rollout.multi_turn.enable is true; set it to "
            "false, or validate conversations by rolemesh run with trainer.val_only=true"
        )


def check_output(output: Path, suffix: str) -> None:
    """Raise InvalidConfig if an output file has another suffix, or its folder does not exist."""
    if output.suffix != suffix:
        raise InvalidConfig(f"--output is {output}; a file with the suffix {suffix} expected")
    if not output.absolute().parent.is_dir():
        raise InvalidConfig(f"--output is {output}, but there is no folder {output.absolute().parent}; make it")
    if output.is_dir():
        raise InvalidConfig(f"--output is {output}, which is a folder; a file expected")


def read_input_rows(job: JobConfig, prompts: PromptDataset, *, log_probs: bool) -> pa.Table:
    """Return the rows of the prompts with all their columns.

    Raises:
        InvalidData: the files cannot be one table in Parquet, or have a column that generation adds.
    """
    if job.data.source.origin == BUILT_IN:
        table = read_all_columns([Path(data_file(file)) for file in job.data.val_files])
    else:
        source = load_rows(job.data.val_files, job.data, "val", "bare prompts")
        table = table_of(source.rows(range(len(source))), f"data set {job.data.dataset}")
    where = ", ".join(job.data.val_files) or job.data.dataset
    try:  # now, and not when all responses are there
        pq.write_table(table.slice(0, 0), pa.BufferOutputStream())
    except pa.ArrowException as error:
        raise InvalidData(f"{where} has a column that Parquet cannot hold: {error}; drop it") from error
    added = (RESPONSES, IDS, *((LOG_PROBS,) if log_probs else ()))
    if there := [name for name in added if name in table.column_names]:
        raise InvalidData(
            f"{where} has a column {there[0]!r} already, which generate would add; rename or drop it"
        )
    return table if len(prompts) == len(table) else table.take(prompts.positions)


def settings_of(job: JobConfig, prompts: PromptDataset) -> dict[str, Any]:
    """Return everything that decides the bits of the responses, by key. Placement and replicas do not."""
    data = {
        key: value for key, value in _keys(job.data, "data").items() if key.partition(".")[2] not in TRAINING
    }
    return {
        **data,
        **_keys(job.rollout, "rollout"),
        **_keys(job.actor.model, "actor.model"),
        "actor.head_dtype": job.actor.head_dtype,
        "trainer.device": job.trainer.device,
        "trainer.deterministic": job.trainer.deterministic,
        "reward.skip_special_tokens": job.reward.skip_special_tokens,
        "plugins": list(job.plugins),
        "the prompts' tokens": prompts.digest,
        "the model's files": _files_of(job),
    }


def _keys(section: Config, name: str) -> dict[str, Any]:
    """Return the keys of a section with their values, `name.key`, down to values that are no section."""
    found: dict[str, Any] = {}
    for key, value in section.model_dump(mode="json").items():
        inner = getattr(section, key)
        found |= _keys(inner, f"{name}.{key}") if isinstance(inner, Config) else {f"{name}.{key}": value}
    return found


def _files_of(job: JobConfig) -> list[tuple[str, int, int]]:
    """Return name, bytes and time of change of the model's files: a model trained on is another one."""
    files = sorted(described_directory(job.actor.model, "rollout").iterdir())
    stats = [(file.name, file.stat()) for file in files if file.suffix in (".json", ".safetensors", ".jinja")]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
