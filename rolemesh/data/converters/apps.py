"""Converts APPS (Hendrycks et al. 2021, arXiv:2105.09938; MIT licence) to Parquet: programs and their tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from rolemesh.data.json_lines import records
from rolemesh.data.parquet import write_rows
from rolemesh.errors import InvalidData

logger = logging.getLogger(__name__)

DATA_SOURCE = "apps"  # its rule is prime_code
# PRIME's instruction (Cui et al. 2025, arXiv:2502.01456).
INSTRUCTION = (
    "Write Python code to solve the problem. Present the code in \n```python\nYour code\n```\nat the end."
)
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "difficulty": pa.string()}),
    }
)


def write_apps(src: Path, out: Path) -> list[Path]:
    """Write OUT/train.parquet and OUT/test.parquet, one for each split found, in bounded memory.

    The ground truth is the text of input_output.json. Problems without tests, and with tests that Python
    refuses to parse (an integer of more than 4300 digits), are left out; their number is logged.

    Args:
        src: the folder APPS of the publishers' archive (train/0000/question.txt, input_output.json, …); or a
            folder with train.jsonl, test.jsonl or both, or one such file (the columns question, input_output).
        out: a folder; created if missing.

    Returns:
        The files written.

    Raises:
        InvalidData: no such file, or an invalid problem. The message names it.
    """
    sources = [src] if src.is_file() else [_source(src, split) for split in ("train", "test")]
    found = [source for source in sources if source is not None]
    if not found:
        raise InvalidData(
            f"{src} is neither a JSONL file, nor a folder with train.jsonl or test.jsonl, nor the folder APPS, "
            "with train/0000/question.txt"
        )
    return [write_rows(out / f"{source.stem}.parquet", _rows(source, source.stem), SCHEMA) for source in found]


def _source(src: Path, split: str) -> Path | None:
    file = src / f"{split}.jsonl"
    folder = src / split
    if file.is_file():
        return file
    return folder if any(folder.glob("*/question.txt")) else None


def _rows(source: Path, split: str) -> Iterator[dict[str, Any]]:
    num_left_out = num_written = 0
    for index, (where, problem) in enumerate(_problems(source)):
        question = problem.get("question")
        tests = problem.get("input_output") or ""
        starter = problem.get("starter_code") or ""
        if not all(isinstance(text, str) for text in (question, tests, starter)):
            raise InvalidData(f"{where}: expected the texts question and input_output; got {sorted(problem)}")
        if not _has_tests(tests, where):
            num_left_out += 1
            continue
        num_written += 1
        given = f"\n\n{starter}" if starter.strip() else ""
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": f"{question}{given}\n\n{INSTRUCTION}"}],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": tests},
            "extra_info": {"split": split, "index": index, "difficulty": str(problem.get("difficulty", ""))},
        }
    if not num_written:
        raise InvalidData(f"{source} has no problems with tests")
    if num_left_out:
        logger.warning("%s: left out %d problems without usable tests", source, num_left_out)


def _problems(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each problem as a row of the JSONL file has it, and its place for messages."""
    if source.is_file():
        yield from ((f"{source}, row {at}", row) for at, _, row in records(source))
        return
    for folder in sorted(path.parent for path in source.glob("*/question.txt")):
        texts = {
            "question": "question.txt",
            "input_output": "input_output.json",
            "starter_code": "starter_code.py",
        }
        try:
            problem = {
                key: (folder / name).read_text(encoding="utf-8")
                for key, name in texts.items()
                if (folder / name).is_file()
            }
            metadata = folder / "metadata.json"
            if metadata.is_file():
                problem["difficulty"] = str(json.loads(metadata.read_bytes())["difficulty"])
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidData(f"{folder}: not a problem in UTF-8 with its metadata: {error}") from error
        yield str(folder), problem


def _has_tests(text: str, where: str) -> bool:
    """Return whether a problem has tests that the rule can read.

    Raises:
        InvalidData: the text is not tests.
    """
    if not text.strip():
        return False
    try:
        tests = json.loads(text, parse_int=str)
        inputs = tests["inputs"]
        outputs = tests["outputs"]
        usable = bool(inputs) and len(inputs) == len(outputs)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidData(
            f"{where}: input_output should be JSON with inputs and outputs: {error!r:.200}"
        ) from error
    try:
        json.loads(text)
    except ValueError:  # an integer of more digits than Python converts
        return False
    return usable
