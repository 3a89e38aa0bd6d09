"""GSM8K's rule: the number after the last "####", near the end of the response, equals the ground truth."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from rolemesh.services.reward.functions.ground_truth import right_answers

# No character is in both classes: what does not match is given up in one pass.
ANSWER = re.compile(r"####([-+$\s]*[0-9.,]+)")


def compute_score(
    solution_str: str, ground_truth: Any, *, format_score: float = 0.0, answer_chars: int | None = 300
) -> dict[str, float | str]:
    """1.0 where the answer is right, format_score where there is one and it is wrong, else 0.0; pred is the
    number in one spelling, "" for none.

    The answer is what digits, commas and periods follow the last "####" that has some, within the last
    `answer_chars` characters (None: anywhere). "#### 1,234", "#### $1234" and "#### 1234.00" are the same;
    "#### ," is an answer, and a wrong one.

    Raises:
        ValueError: the ground truth holds no number.
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
    """1234 for 1234.00, to all digits."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(text: str) -> Decimal | None:
    """The number that a text is, without commas, dollar signs, spaces and a final period."""
    try:
        value = Decimal(re.sub(r"[,$\s]", "", text).removesuffix("."))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
