"""Writes the demo's task: additions of two-digit numbers. The right answer to "37+48=" is "#### 85".

A model of a hundred thousand parameters can learn it. gsm8k's rule scores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolemesh.data.order import permutation
from rolemesh.data.parquet import write_rows
from rolemesh.data.progress_bar import track
from rolemesh.errors import InvalidData

DATA_SOURCE = "rolemesh/arithmetic"
SMALLEST = 10
LARGEST = 99
NUM_PROBLEMS = (LARGEST - SMALLEST + 1) ** 2  # every ordered pair

Problem = tuple[int, int]


def arithmetic_problems(num_val: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Split all ordered pairs of two-digit numbers into (train, val).

    A pair and its mirror image (a+b, b+a) are in the same split, so that no training row reveals a held-out
    sum.

    Args:
        num_val: largest number of held-out problems.
        seed: chooses the held-out problems.

    Raises:
        InvalidData: not 0 < num_val < 8,100.
    """
    if not 0 < num_val < NUM_PROBLEMS:
        raise InvalidData(f"{num_val} held-out problems; expected 1 to {NUM_PROBLEMS - 1} of {NUM_PROBLEMS}")
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
    """Return the answer in the form that gsm8k's rule reads."""
    return f"#### {number}"


def write_arithmetic(out: Path, *, num_val: int = 256, seed: int = 0) -> list[Path]:
    """Write OUT/train.parquet and OUT/val.parquet; the seed chooses the held-out problems.

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
