"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168; MIT licence) from its JSONL files to Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rolemesh.data.parquet import write_rows
from rolemesh.data.progress import track
from rolemesh.errors import InvalidData

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def write_gsm8k(src: Path, out: Path) -> list[Path]:
    """Writes OUT/train.parquet and OUT/test.parquet, one for each JSONL file found.

    Args:
        src: a folder with train.jsonl, test.jsonl or both, or one such file. A row holds `question` and
            `answer`, the worked solution that ends in "#### <number>".
        out: a folder; made if absent.

    Returns:
        The files written.

    Raises:
        InvalidData: no such file, a line that is not such a row; names file and line.
    """
    sources = [src] if src.is_file() else [src / f"{split}.jsonl" for split in ("train", "test")]
    found = [source for source in sources if source.is_file()]
    if not found:
        raise InvalidData(f"{src} is neither a JSONL file nor a folder with train.jsonl or test.jsonl")
    return [write_rows(out / f"{source.stem}.parquet", gsm8k_rows(source)) for source in found]


def gsm8k_rows(source: Path) -> list[dict[str, Any]]:
    """The rows of one JSONL file in verl's layout; the split is the file's name."""
    # Not splitlines: text within a JSON line may hold other line separators (U+2028).
    lines = [line for line in source.read_bytes().split(b"\n") if line.strip()]
    if not lines:
        raise InvalidData(f"{source} has no rows")
    named = track(enumerate(lines), f"reading {source.name}", len(lines))
    return [_row(line, index, source) for index, line in named]


def _row(line: bytes, index: int, source: Path) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
        question, answer = record["question"], record["answer"]
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
