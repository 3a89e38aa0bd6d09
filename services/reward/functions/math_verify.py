r"""Answers that are equal as mathematics, by the library math-verify (https://github.com/huggingface/Math-Verify):
1/2, 0.5 and \frac{2}{4} are one.

Its own time limits are alarms (SIGALRM), which only a process's main thread can have: it is called in the main
thread of a process that scores, and nowhere else.
"""

from __future__ import annotations

import logging
from typing import Any

from rolemesh.services.reward.functions.ground_truth import right_answers

TIMEOUT_S = 5  # for reading an expression, and for each comparison; then it is not equal


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""1.0 where the response's answer (its last \boxed{}, else its last expression) equals a right answer,
    else 0.0; also where the library cannot read one of the two, or does not come to an end.

    Raises:
        ValueError: the ground truth is of no known form, or not in the main thread.
    """
    # A second to import, which only processes that use it spend.
    from math_verify import (  # type: ignore[import-untyped]
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
        verify,
    )

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would log the whole response
    given = parse(solution_str, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=TIMEOUT_S)
    answers = [
        parse(rf"\boxed{{{answer}}}", (LatexExtractionConfig(),), parsing_timeout=TIMEOUT_S)
        for answer in right_answers(ground_truth)
    ]
    return float(
        any(verify(answer, given, timeout_seconds=TIMEOUT_S) for answer in answers if answer and given)
    )
