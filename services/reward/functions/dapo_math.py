r"""DAPO's rule for mathematics (Yu et al. 2025, arXiv:2503.14476).

The prompts ask for a last line "Answer: …". The last answer must agree with the ground truth
(rolemesh/rules/normal_form.py).
"""

from __future__ import annotations

from typing import Any

from rolemesh.rules.finding import answer_of_line_or_box
from rolemesh.rules.ground_truth import right_answers
from rolemesh.rules.normal_form import agrees, read_answer


def compute_score(
    solution_str: str, ground_truth: Any, *, answer_chars: int | None = 300
) -> dict[str, float | str]:
    r"""Score 1.0 if the answer is correct, otherwise -1.0; acc is 1 or 0.

    The answer is the rest of the line after the last "Answer:", or, if there is none, the last \boxed{}. Both
    are searched in the last `answer_chars` characters (None: anywhere). pred is the answer in its normal form,
    "" if there is none.

    Raises:
        ValueError: the ground truth has an unknown form.
    """
    answers = [read_answer(answer) for answer in right_answers(ground_truth)]
    found = answer_of_line_or_box(solution_str if answer_chars is None else solution_str[-answer_chars:])
    given = None if found is None else read_answer(found)
    right = given is not None and any(agrees(given, answer) for answer in answers)
    return {
        "score": 1.0 if right else -1.0,
        "acc": float(right),
        "pred": "" if given is None else given.value,
    }
