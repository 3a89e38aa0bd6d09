"""GSM8K's rule: the number after the last "####" equals the ground truth."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from services.reward.functions.ground_truth import right_answers

# No character is in both classes: what does not match is given up in one pass.
ANSWER = re.compile(r"####([-+$\s]*[0-9.,]+)")


def compute_score(solution_str: str, ground_truth: Any, *, format_score: float = 0.0) -> dict[str, float]:
    """1.0 where the number is right, format_score where there is one and it is wrong, else 0.0.

    "#### 1,234", "#### $1234" and "#### 1234.00" are the same number.

    Raises:
        ValueError: the ground truth holds no number.
    """
    answers = [number(answer) for answer in right_answers(ground_truth)]
    if None in answers:
        raise ValueError(f"ground_truth {ground_truth!r:.200} is not a number, which gsm8k's rule compares")
    given = last_number(solution_str)
    right = given is not None and given in answers
    return {"score": 1.0 if right else format_score if given is not None else 0.0, "acc": float(right)}


def last_number(solution_str: str) -> Decimal | None:
    """The number after the last "####" that has one."""
    values = (number(text) for text in reversed(ANSWER.findall(solution_str)))
    return next((value for value in values if value is not None), None)


def number(text: str) -> Decimal | None:
    """The number that a text is, without commas, dollar signs, spaces and a final period."""
    try:
        value = Decimal(re.sub(r"[,$\s]", "", text).removesuffix("."))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
