"""GSM8K's rule: the number after the last "####" near the end of the response must equal the ground truth."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from rolemesh.rules.ground_truth import right_answers

# No character is in both classes, so there is no backtracking over a text that does not match.
ANSWER = re.compile(r"####([-+$\s]*[0-9.,]+)")


def compute_score(
    solution_str: str, ground_truth: Any, *, format_score: float = 0.0, answer_chars: int | None = 300
) -> dict[str, float | str]:
    """Score 1.0 if the answer is correct, format_score if it is wrong, 0.0 if there is none.

    The answer is the digits, commas and periods after the last "####" that is followed by any, within the last
    `answer_chars` characters (None: anywhere). "#### 1,234", "#### $1234" and "#### 1234.00" are equal;
    "#### ," is a wrong answer. pred is the number in its normal spelling, "" if there is none.

    Raises:
        ValueError: the ground truth is not a number.
    """
    answers = [number(answer) for answer in right_answers(ground_truth)]
    if None in answers:
        raise ValueError(f"ground_truth {ground_truth!r:.200} is not a number, which gsm8k's rule compares")
    found = ANSWER.findall(solution_str if answer_chars is None else solution_str[-answer_chars:])
    given = number(found[-1]) if found else None
    right = given is not None and given in answers
    score = 1.0 if right else format_score if found else 0.0
    return {"score": score, "acc": float(right), "pred": "" if given is None else spelling(given)}


def spelling(value: Decimal) -> str:
    """Write a number with all its digits, but without trailing zeros: 1234 for 1234.00."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(text: str) -> Decimal | None:
    """Parse a number, ignoring commas, dollar signs, spaces and a final period; None if it is not a number."""
    try:
        value = Decimal(re.sub(r"[,$\s]", "", text).removesuffix("."))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
