r"""Mathematical equality by the library math-verify (https://github.com/huggingface/Math-Verify).

1/2, 0.5 and \frac{2}{4} are equal. The library's time limits are alarms (SIGALRM), which work only in a
process's main thread. So it is called only in the main thread of a scoring process.
"""

from __future__ import annotations

import logging
from typing import Any

from rolemesh.rules.ground_truth import right_answers

TIMEOUT_S = 5  # for parsing an expression, and for each comparison; then the answer counts as wrong


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""Score 1.0 if the response's answer equals a correct answer, otherwise 0.0.

    The answer is the last \boxed{}, or, if there is none, the last expression. The score is also 0.0 if the
    library cannot parse one of the two, or exceeds its time limit.

    Raises:
        ValueError: the ground truth has an unknown form, or this is not the main thread.
    """
    # The import takes a second, so only processes that use the library import it.
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
