"""The demo's task: additions of two-digit numbers, "37+48=" to be answered "#### 85".

Small enough for a model of a hundred thousand parameters, and scored by gsm8k's rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolemesh.data.order import permutation
from rolemesh.data.parquet import write_rows
from rolemesh.data.progress import track
from rolemesh.errors import InvalidData

DATA_SOURCE = "rolemesh/arithmetic"
SMALLEST, LARGEST = 10, 99
NUM_PROBLEMS = (LARGEST - SMALLEST + 1) ** 2  # every ordered pair

Problem = tuple[int, int]


def arithmetic_problems(num_val: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """All pairs of two-digit numbers as (train, val). A pair and its mirror image (a+b, b+a) are on the same
    side, so that no held-out sum can be read off a training row.

    Raises:
        InvalidData: not 0 < num_val < 8,100.
    """
    if not 0 < num_val < NUM_PROBLEMS:
        raise InvalidData(f"{num_val} held-out problems of {NUM_PROBLEMS}")
    numbers = range(SMALLEST, LARGEST + 1)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    val: list[Problem] = []
    train: list[Problem] = []
    for at in permutation(len(pairs), seed, 0).tolist():
        a, b = pairs[at]
        both = [(a, b), (b, a)] if a != b else [(a, b)]
        (val if len(val) + len(both) <= num_val else train).extend(both)
    return train, val


def question(problem: Problem) -> str:
    return f"{problem[0]}+{problem[1]}="


def answer(number: str) -> str:
    """The form that gsm8k's rule reads."""
    return f"#### {number}"


def write_arithmetic(out: Path, *, num_val: int = 256, seed: int = 0) -> list[Path]:
    """Writes OUT/train.parquet and OUT/val.parquet; the seed says which problems are held out.

    Returns:
        The two files.

    Raises:
        InvalidData: not 0 < num_val < 8,100.
    """
    train, val = arithmetic_problems(num_val, seed)
    return [
        write_rows(out / f"{split}.parquet", _rows(problems, split))
        for split, problems in (("train", train), ("val", val))
    ]


def _rows(problems: Sequence[Problem], split: str) -> list[dict[str, Any]]:
    named = track(enumerate(problems), f"writing {split}.parquet", len(problems))
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question(problem)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(sum(problem))},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in named
    ]
