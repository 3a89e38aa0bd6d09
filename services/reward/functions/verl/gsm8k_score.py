"""GSM8K's rule as in verl 0.9.1: the text after the last "#### " must be the ground truth."""

from __future__ import annotations

import re
from typing import Any

from rolemesh.rules.ground_truth import right_answers

ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def compute_score(
    solution_str: str, ground_truth: Any, *, format_score: float = 0.0, answer_chars: int | None = 300
) -> dict[str, float | str]:
    """Score 1.0 if the answer is correct, format_score if it is wrong, 0.0 if there is none.

    Commas are removed from the answer, and not from the ground truth. pred is the answer, "" if there is none.

    Raises:
        ValueError: the ground truth has an unknown form.
    """
    found = ANSWER.findall(solution_str if answer_chars is None else solution_str[-answer_chars:])
    pred = found[-1].replace(",", "") if found else ""
    right = bool(found) and pred in right_answers(ground_truth)
    score = format_score if found else 0.0
    if right:
        score = 1.0
    return {"score": score, "acc": float(right), "pred": pred}
