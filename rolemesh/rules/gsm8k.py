"""GSM8K's rule: the number after the last "####" near the end of the response must equal the ground truth."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from rolemesh.rules.finding import marked_number
from rolemesh.rules.ground_truth import right_answers
from rolemesh.rules.normal_form import NormalForm, agrees, read_answer
from rolemesh.rules.numbers import number, spelling

OPERATION = re.compile(r"[0-9)}][-+*/^]|\\(?:times|cdot|div|frac)(?![A-Za-z])")


def compute_score(
    solution_str: str, ground_truth: Any, *, format_score: float = 0.0, answer_chars: int | None = 300
) -> dict[str, float | str]:
    """Score 1.0 if the answer is correct, format_score if it is wrong, 0.0 if there is none.

    The answer is the number after the last "####" that is followed by one, within the last `answer_chars`
    characters (None: anywhere). "#### 1,234", "#### $1234", "#### **1234.00**" and "#### 617 * 2 = 1234" are
    equal. "#### ," is a wrong answer, and so is "#### 12,34". pred is the number in its normal spelling, "" if
    there is none.

    Raises:
        ValueError: the ground truth is not a number.
    """
    answers = right_numbers(ground_truth)
    found = marked_number(solution_str if answer_chars is None else solution_str[-answer_chars:])
    given = None if found is None else _given(found)
    right = given is not None and given in answers
    score = 0.0 if found is None else format_score
    if right:
        score = 1.0
    return {"score": score, "acc": float(right), "pred": "" if given is None else spelling(given)}


def right_numbers(ground_truth: Any) -> list[Decimal]:
    """Return the correct answers as numbers.

    Raises:
        ValueError: one of them is not a number, or there is none.
    """
    answers = [_number(answer) for answer in right_answers(ground_truth)]
    numbers = [answer for answer in answers if answer is not None]
    if len(numbers) < len(answers):
        raise ValueError(f"ground_truth {ground_truth!r:.200} is not a number, which gsm8k's rule compares")
    return numbers


def _given(text: str) -> Decimal | None:
    """Return the number that a response gives, also after its calculation: 18 of "9 * 2 = 18", not "9 = 18"."""
    value = read_answer(text).value
    *left, right = value.split("=")
    given = number(right)
    if given is None or not left:
        return given
    computes = all(OPERATION.search(side) or number(side) == given for side in left)
    return given if computes and agrees(NormalForm(value), NormalForm(spelling(given))) else None


def _number(text: str) -> Decimal | None:
    return number(read_answer(text).value)
