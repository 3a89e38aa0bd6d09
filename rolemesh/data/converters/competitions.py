r"""Converts problems of mathematics to Parquet: MATH and AIME 2024.

MATH (Hendrycks et al. 2021, arXiv:2103.03874; MIT licence) has worked solutions with the answer in \boxed{}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rolemesh.data.json_lines import is_json_lines, records
from rolemesh.data.parquet import read_table, write_rows
from rolemesh.errors import InvalidData, unreadable
from rolemesh.rules.boxed import last_boxed

MATH = "DigitalLearningGmbH/MATH-lighteval"  # verl's name
AIME = "aime2024"
MATH_INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
# DAPO's prompt (Yu et al. 2025, arXiv:2503.14476), which the rule of these rows expects.
AIME_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def write_math(src: Path, out: Path) -> list[Path]:
    """Write OUT/train.parquet and OUT/test.parquet, one for each folder found.

    Args:
        src: the folder MATH of the publishers' archive, with train/SUBJECT/NUMBER.json and test/….
        out: a folder; created if missing.

    Returns:
        The files written.

    Raises:
        InvalidData: there is no such file, or one is not a problem. The message names it.
    """
    found = {split: sorted((src / split).glob("*/*.json"), key=_place) for split in ("train", "test")}
    if not any(found.values()):
        raise InvalidData(f"{src} is not the folder MATH: it has no train/SUBJECT/NUMBER.json and no test/…")
    return [
        write_rows(out / f"{split}.parquet", [_problem(file, split, i) for i, file in enumerate(files)])
        for split, files in found.items()
        if files
    ]


def _place(file: Path) -> tuple[str, int, str]:
    return file.parent.name, int(file.stem) if file.stem.isdecimal() else -1, file.stem


def _problem(file: Path, split: str, index: int) -> dict[str, Any]:
    try:
        record = json.loads(file.read_bytes())
        problem = record["problem"]
        solution = record["solution"]
        answer = last_boxed(solution)
        extra = {"split": split, "index": index, "level": str(record["level"]), "type": str(record["type"])}
        f"{problem}{solution}{extra}".encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidData(f"{file}: expected an object with problem, solution, level and type") from error
    if not isinstance(problem, str) or not answer:
        raise InvalidData(rf"{file}: expected a problem, and a solution with the answer in \boxed{{}}")
    return _row(MATH, f"{problem} {MATH_INSTRUCTION}", answer, extra)


def write_aime(src: Path, out: Path) -> Path:
    """Write OUT/test.parquet.

    Args:
        src: a Parquet or JSON Lines file with the columns problem and answer, in any letter case, as several
            publishers have it.
        out: a folder; created if missing.

    Raises:
        InvalidData: the file cannot be read, a column is missing, or an answer is not an integer of 0 to 999.
    """
    rows = []
    for index, record in enumerate(_records(src)):
        named = {name.lower(): value for name, value in record.items()}
        if missing := {"problem", "answer"} - named.keys():
            raise InvalidData(f"{src}, row {index} has no column {sorted(missing)}; it has {sorted(record)}")
        problem = named["problem"]
        answer = str(named["answer"]).strip()
        if not isinstance(problem, str) or not (answer.isascii() and answer.isdecimal() and len(answer) < 4):
            raise InvalidData(
                f"{src}, row {index}: expected a problem, and an integer of 0 to 999 as its answer; got "
                f"{answer!r:.80}"
            )
        prompt = AIME_PROMPT.replace("{problem}", problem)
        rows.append(_row(AIME, prompt, str(int(answer)), {"split": "test", "index": index}))
    if not rows:
        raise InvalidData(f"{src} has no rows")
    return write_rows(out / "test.parquet", rows)


def _records(src: Path) -> Iterator[dict[str, Any]]:
    if is_json_lines(src):
        yield from (row for _, _, row in records(src))
        return
    if not src.is_file():
        raise InvalidData(f"no such file: {src}")
    try:
        names = pq.read_schema(src).names
    except (pa.ArrowException, OSError) as error:
        raise unreadable(InvalidData, error, f"{src} cannot be read as Parquet: {error}") from error
    yield from read_table(src, [name for name in names if name.lower() in ("problem", "answer")]).to_pylist()


def _row(data_source: str, prompt: str, answer: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": extra,
    }
