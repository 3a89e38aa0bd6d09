"""Converts GSM8K (Cobbe et al. 2021, arXiv:2110.14168; MIT licence) from its JSONL files to Parquet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolemesh.data.parquet import write_rows
from rolemesh.data.progress_bar import track
from rolemesh.errors import InvalidData

DATA_SOURCE = "openai/gsm8k"
IN_A_CLONE = "grade_school_math/data"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
# Who answers the policy's turns, and what the row brings for it: verl's names.
ANSWERS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "tool": lambda question, truth: {
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
    },
    "interaction": lambda question, truth: {
        "interaction_kwargs": {"name": "gsm8k", "query": question, "ground_truth": truth}
    },
}


def write_gsm8k(src: Path, out: Path, answered_by: str | None = None) -> list[Path]:
    """Write OUT/train.parquet and OUT/test.parquet, one for each JSONL file found.

    Args:
        src: a folder with train.jsonl, test.jsonl or both, a clone of the repository grade-school-math, or one
            JSONL file. A row holds `question` and `answer`, the worked solution that ends in "#### <number>".
        out: a folder; created if missing.
        answered_by: rows for `tool_agent`: with the tool calc_gsm8k_reward (`tool`), or with the interaction
            gsm8k, which says what is wrong with an answer (`interaction`). None: rows of one turn.

    Returns:
        The files written.

    Raises:
        InvalidData: no such file, or an invalid line. The message names file and line.
    """
    folders = [src, src / IN_A_CLONE]
    sources = [src, *(folder / f"{split}.jsonl" for folder in folders for split in ("train", "test"))]
    found = [source for source in sources if source.is_file()]
    if not found:
        raise InvalidData(
            f"{src} is neither a JSONL file nor a folder with train.jsonl or test.jsonl; the repository "
            f"openai/grade-school-math has them in {IN_A_CLONE}"
        )
    return [write_rows(out / f"{source.stem}.parquet", gsm8k_rows(source, answered_by)) for source in found]


def gsm8k_rows(source: Path, answered_by: str | None = None) -> list[dict[str, Any]]:
    """Read one JSONL file as rows in verl's layout; the file's name is the split."""
    # splitlines would also split at other separators (U+2028), which JSON text may contain.
    lines = [line for line in source.read_bytes().split(b"\n") if line.strip()]
    if not lines:
        raise InvalidData(f"{source} has no rows")
    named = track(enumerate(lines), f"reading {source.name}", len(lines))
    rows = [_row(line, index, source) for index, line in named]
    return [_answered(row, ANSWERS[answered_by]) for row in rows] if answered_by else rows


def _answered(row: dict[str, Any], bring: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Return the row as `tool_agent` takes it."""
    extra = row["extra_info"]
    brought = bring(extra["question"], row["reward_model"]["ground_truth"])
    return {**row, "agent_name": "tool_agent", "extra_info": {**extra, **brought}}


def _row(line: bytes, index: int, source: Path) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
        question = record["question"]
        answer = record["answer"]
        _, mark, number = answer.rpartition("####")
        f"{question}{answer}".encode()
    except UnicodeError as error:
        raise InvalidData(
            f"{source}, line {index + 1}: not UTF-8, or half a surrogate pair: {error}"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidData(
            f"{source}, line {index + 1}: expected an object with question and answer; got {line[:80]!r}"
        ) from error
    if not mark or not number.strip():
        raise InvalidData(f"{source}, line {index + 1}: the answer does not end in '#### <number>'")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"split": source.stem, "index": index, "question": question, "answer": answer},
    }
