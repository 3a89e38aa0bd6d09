r"""MATH's rule: the last \boxed{} must agree with the ground truth (rolemesh/rules/normal_form.py)."""

from __future__ import annotations

from typing import Any

from rolemesh.rules.boxed import last_boxed
from rolemesh.rules.ground_truth import right_answers
from rolemesh.rules.normal_form import agrees, read_answer


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""Score 1.0 if the last \boxed{} of the response agrees with a correct answer, otherwise 0.0.

    Raises:
        ValueError: the ground truth has an unknown form.
    """
    answers = [read_answer(answer) for answer in right_answers(ground_truth)]
    found = last_boxed(solution_str)
    given = None if found is None else read_answer(found)
    return float(given is not None and any(agrees(given, answer) for answer in answers))
