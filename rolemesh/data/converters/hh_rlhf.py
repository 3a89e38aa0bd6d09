"""Converts hh-rlhf (Bai et al. 2022, arXiv:2204.05862; MIT licence) to Parquet: pairs of answers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolemesh.data.json_lines import records
from rolemesh.data.parquet import write_rows
from rolemesh.errors import InvalidData

logger = logging.getLogger(__name__)

DATA_SOURCE = "Anthropic/hh-rlhf"
ANSWERS = "\n\nAssistant:"
TURN = re.compile(r"\n\n(Human|Assistant):")
ROLES = {"Human": "user", "Assistant": "assistant"}
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "chosen": pa.string(),
        "rejected": pa.string(),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64()}),
    }
)


def write_hh_rlhf(src: Path, out: Path) -> list[Path]:
    """Write OUT/train.parquet and OUT/test.parquet, one for each file found, in bounded memory.

    A row's prompt is the dialogue that both answers have in common, as messages. It serves as a prompt of PPO
    with a reward model; chosen and rejected are texts. Pairs of equal answers, or with an empty one, are left
    out, and counted.

    Args:
        src: a folder with train.jsonl.gz, test.jsonl.gz or both (also without .gz), or one such file.
        out: a folder; created if missing.

    Returns:
        The files written.

    Raises:
        InvalidData: no such file, or an invalid row. The message names file and row.
    """
    names = [f"{split}.jsonl{end}" for split in ("train", "test") for end in (".gz", "")]
    sources = [src] if src.is_file() else [src / name for name in names if (src / name).is_file()]
    if not sources:
        raise InvalidData(f"{src} is neither a JSONL file nor a folder with {', '.join(names)}")
    splits = [source.name.split(".")[0] for source in sources]
    if twice := {split for split in splits if splits.count(split) > 1}:
        raise InvalidData(f"{src} has {twice.pop()}.jsonl with and without .gz; give one of the files")
    return [
        write_rows(out / f"{split}.parquet", _rows(source, split), SCHEMA)
        for source, split in zip(sources, splits, strict=True)
    ]


def _rows(source: Path, split: str) -> Iterator[dict[str, Any]]:
    index = -1
    num_left_out = 0
    for index, _, record in records(source):
        pair = [text for text in map(record.get, ("chosen", "rejected")) if isinstance(text, str)]
        if len(pair) < 2:
            raise InvalidData(
                f"{source}, row {index}: expected the texts chosen and rejected; got {sorted(record)}"
            )
        shared = os.path.commonprefix(pair)  # noqa: RUF071  # of characters
        end = shared.rfind(ANSWERS)
        messages = _messages(shared[:end]) if end >= 0 else []
        if not messages or messages[0]["role"] != "user":
            raise InvalidData(
                f"{source}, row {index}: chosen and rejected should begin with the same dialogue, "
                rf"'\n\nHuman: …\n\nAssistant:'; they begin with {shared[:80]!r}"
            )
        chosen, rejected = (text[end + len(ANSWERS) :].strip() for text in pair)
        if chosen == rejected or not chosen or not rejected:
            num_left_out += 1
            continue
        yield {
            "data_source": DATA_SOURCE,
            "prompt": messages,
            "chosen": chosen,
            "rejected": rejected,
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": ""},
            "extra_info": {"split": split, "index": index},
        }
    if index < 0:
        raise InvalidData(f"{source} has no rows")
    if num_left_out:
        logger.warning("%s: left out %d pairs with equal or empty answers", source, num_left_out)


def _messages(dialogue: str) -> list[dict[str, str]]:
    """Split a dialogue; empty if it does not begin with a turn."""
    start, *turns = TURN.split(dialogue)
    if start.strip():
        return []
    return [
        {"role": ROLES[name], "content": text.strip()}
        for name, text in zip(turns[::2], turns[1::2], strict=True)
    ]
