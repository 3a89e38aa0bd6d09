"""Reads the correct answers from the forms of ground truth in data sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def right_answers(ground_truth: Any) -> list[str]:
    """Return the correct answers in text, a number, a list of these, or {"target": one of these}.

    Raises:
        ValueError: it is none of these, has no answer, or has NaN as one.
    """
    if isinstance(ground_truth, Mapping) and "target" in ground_truth:
        ground_truth = ground_truth["target"]
    answers = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not answers or not all(map(_is_answer, answers)):
        raise ValueError(
            "ground_truth should be text, a number, a list of these or {'target': …}; "
            f"it is {ground_truth!r:.200}"
        )
    return [str(answer) for answer in answers]


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and not math.isnan(value))
