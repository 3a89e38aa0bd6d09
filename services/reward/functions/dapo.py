r"""DAPO's rule for mathematics (Yu et al. 2025, arXiv:2503.14476; the prompts ask for a last line "Answer: …"):
the last answer equals the ground truth once both are spelled alike, as in Minerva (Lewkowycz et al. 2022,
arXiv:2206.14858, appendix D.1)."""

from __future__ import annotations

import re
from typing import Any

from services.reward.functions.ground_truth import right_answers
from services.reward.functions.math import last_boxed

TAIL = 300  # characters in which the answer has to be
ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")

REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals"),
    *("edges", "students", "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}"),
    *(r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;"),
    *(r",\!", "{,}", '"', r"\dots"),
)


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, float | str]:
    r"""1.0 where the answer is right, else -1.0; acc says 1 or 0; pred is the answer as it was compared, "" for
    none.

    The answer is what follows the last "Answer:" on its line, or, where none is, the last \boxed{}.

    Raises:
        ValueError: the ground truth is of no known form.
    """
    tail = solution_str[-TAIL:]
    found = ANSWER.findall(tail)
    given = found[-1] if found else last_boxed(tail)
    answers = [normalise(answer) for answer in right_answers(ground_truth)]
    pred = None if given is None else normalise(given)
    right = pred in answers
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred or ""}


def normalise(answer: str) -> str:
    r"""One spelling for each answer: without a left side, units, text and currency; "\frac12" becomes
    "frac{1}{2}" with its backslash, and "1,000" becomes "1000"."""
    answer = answer.split("=")[-1]
    for before, after in (*REPLACED, *((unit, "") for unit in UNITS)):
        answer = answer.replace(before, after)
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)  # what stands between dollars
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
