"""A data set without files: additions that need a carry, which are made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from rolemesh.config.data import DataConfig
from rolemesh.plugins import Options, dataset


class CarriesOptions(Options):
    """Keys of data.options in the job file."""

    largest: int = Field(99, ge=19, le=99)


class Carries:
    """Every pair of two-digit numbers whose units add up to ten or more; each ninth is kept for validation."""

    def __init__(self, largest: int, split: str) -> None:
        numbers = range(10, largest + 1)
        pairs = [(a, b) for a in numbers for b in numbers if a % 10 + b % 10 >= 10]
        self.pairs = [pair for i, pair in enumerate(pairs) if (i % 9 == 0) == (split == "val")]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        a, b = self.pairs[index]
        return {
            "data_source": "rolemesh/arithmetic",  # picks the rule that scores answers
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": index},
        }


@dataset("carries", options=CarriesOptions, meaning="additions with a carry")
def make_carries(files: Sequence[str], config: DataConfig, split: str, *, largest: int) -> Carries:
    """Return the rows of a split, "train" or "val": any sequence of dicts, always the same and in one order.

    Args:
        files: data.train_files or data.val_files; none here.
        config: the section `data` of the job.
    """
    return Carries(largest, split)
