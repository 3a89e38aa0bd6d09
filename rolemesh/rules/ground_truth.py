"""Reads the correct answers from the forms of ground truth in data sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def right_answers(ground_truth: Any) -> list[str]:
    """Return the correct answers in text, a number, a list of these, or {"target": one of these}.

    Raises:
        ValueError: it is none of these, has no answer, or has blank text, a boolean or NaN as one.
    """
    if isinstance(ground_truth, Mapping) and "target" in ground_truth:
        ground_truth = ground_truth["target"]
    answers = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not answers or not all(map(_is_answer, answers)):
        raise ValueError(
            "ground_truth should be text, a number, a list of these or {'target': …}, without blank text; "
            f"it is {ground_truth!r:.200}"
        )
    return [str(answer) for answer in answers]


def _is_answer(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool)
