r"""Mathematical equality by the library math-verify (https://github.com/huggingface/Math-Verify).

1/2, 0.5 and \frac{2}{4} are equal. The library's time limits are alarms (SIGALRM), which work only in a
process's main thread. So it is called only in the main thread of a scoring process.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

from rolemesh.rules.boxed import last_boxed
from rolemesh.rules.ground_truth import right_answers
from rolemesh.rules.normal_form import agrees, is_multiple, labelled_otherwise, read_answer
from rolemesh.services.reward.functions.exactness import equal_though_large, still_equal

TIMEOUT_S = 5  # for parsing an expression, and for each comparison; then the answer counts as wrong


def compute_score(solution_str: str, ground_truth: Any, *, exact: bool = True) -> float:
    r"""Score 1.0 if the response's answer equals a correct answer, otherwise 0.0.

    The answer is the last \boxed{}, or, if there is none, the expression that the library finds. The score is
    also 0.0 if the library cannot parse one of the two, or exceeds its time limit.

    Args:
        solution_str: the response.
        ground_truth: the right answer, or a list of these.
        exact: accept the same normal form, too, and compare numbers relative to their size (exactness.py).
            False: the library's result alone, whose tolerance is absolute.

    Raises:
        ValueError: the ground truth has an unknown form, or this is not the main thread.
    """
    # The import takes a second, so only processes that use the library import it.
    from math_verify import (  # type: ignore[import-untyped]
        ExprExtractionConfig,
        LatexExtractionConfig,
        parse,
    )

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would log the whole response
    answers = right_answers(ground_truth)
    if exact and r"\boxed" in solution_str:
        box = last_boxed(solution_str)
        if box is None:  # it is cut off
            return 0.0
        of_box = read_answer(box)
        forms = {answer: read_answer(answer) for answer in answers}
        if any(agrees(of_box, form) for form in forms.values()):
            return 1.0
        # The library compares no units, and leaves out "million".
        answers = [
            answer
            for answer, form in forms.items()
            if not labelled_otherwise(of_box, form) and is_multiple(of_box) == is_multiple(form)
        ]
        solution_str = rf"\boxed{{{box}}}"
    given = parse(solution_str, (ExprExtractionConfig(), LatexExtractionConfig()), parsing_timeout=TIMEOUT_S)
    right = [
        parse(rf"\boxed{{{answer}}}", (LatexExtractionConfig(),), parsing_timeout=TIMEOUT_S)
        for answer in answers
    ]
    return float(
        any(_equal(one, other, exact) for answer in right for one, other in itertools.product(answer, given))
    )


def _equal(right: Any, given: Any, exact: bool) -> bool:
    from math_verify import verify
    from math_verify.errors import TimeoutException  # type: ignore[import-untyped]
    from math_verify.utils import timeout  # type: ignore[import-untyped]

    equal = bool(verify(right, given, timeout_seconds=TIMEOUT_S))
    if not exact:
        return equal
    try:
        return bool(timeout(TIMEOUT_S)(still_equal if equal else equal_though_large)(right, given))
    except TimeoutException:
        return False
