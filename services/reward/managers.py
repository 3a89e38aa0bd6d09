"""Reward managers: how the reward function is applied to rows. The catalog declares each.

`rows` are dicts with data_source, solution_str, ground_truth and extra_info, the arguments of `compute_score`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Argument names of a function for one row, to those of a function for all rows of a call.
PLURAL = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}


def score_each(compute_score: Callable[..., Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Call the function once for each row."""
    return [compute_score(**row) for row in rows]


def score_together(compute_score: Callable[..., Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Call the function once, with a list for each argument."""
    return compute_score(**{plural: [row[name] for row in rows] for name, plural in PLURAL.items()})
