r"""MATH's rule: the last \boxed{} must equal the ground truth after normalisation.

Strings are compared after notational differences are removed (Hendrycks et al. 2021, arXiv:2103.03874).
"""

from __future__ import annotations

import re
from typing import Any

from rolemesh.rules.boxed import closing_braces, last_boxed
from rolemesh.rules.ground_truth import right_answers

# Notation that does not change the value, in the order of its replacement.
SYNONYMS = (
    ("\n", ""),
    (r"\!", ""),  # negative space
    (r"\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    (r"\left", ""),
    (r"\right", ""),
    (r"^{\circ}", ""),  # degrees
    (r"^\circ", ""),
    (r"\$", ""),
    ("$", ""),
)
PERCENT = ((r"\%", ""), ("%", ""))
ARGUMENT = re.compile(r" *(\{|\\[A-Za-z]+|[^\s}])")


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""Score 1.0 if the last \boxed{} of the response equals a correct answer, otherwise 0.0.

    Raises:
        ValueError: the ground truth has an unknown form.
    """
    given = last_boxed(solution_str)
    answers = [normalise(answer) for answer in right_answers(ground_truth)]
    return float(given is not None and normalise(given) in answers)


def normalise(answer: str) -> str:
    r"""Convert equal answers to the same spelling.

    "\dfrac 12", "1/2" and "0.5" become "\frac{1}{2}". Units, signs of percent, degrees and currency, a short
    left side ("x = 5") and spaces are removed.
    """
    for spelling, plain in SYNONYMS:
        answer = answer.replace(spelling, plain)
    answer = answer.split(r"\text{ ")[0]  # a unit: a text that begins with a space
    for spelling, plain in PERCENT:
        answer = answer.replace(spelling, plain)
    answer = re.sub(r"(^|[ {])\.(?=\d)", r"\g<1>0.", answer)
    left, equals, right = answer.partition("=")
    if equals and "=" not in right and len(left.strip()) <= 2:
        answer = right
    answer = re.sub(r"\\sqrt\s*([^\s{\[\\])", r"\\sqrt{\1}", answer)
    answer = brace_fractions(answer).replace(" ", "")
    if answer == "0.5":
        return r"\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", answer)


def brace_fractions(text: str) -> str:
    r"""Put braces around the arguments of every \frac: "\frac12" and "\frac1{2}" become "\frac{1}{2}".

    A \frac without both arguments, or with an argument that is not closed, is left unchanged.
    """
    closing = closing_braces(text)
    characters = list(text)
    for command in re.finditer(r"\\frac", text):
        at, bare = command.end(), []
        for _ in range(2):
            found = ARGUMENT.match(text, at)
            if found is None or (found[1] == "{" and found.start(1) not in closing):
                break
            if found[1] == "{":
                at = closing[found.start(1)] + 1
            else:
                at = found.end()
                bare.append(found.span(1))
        else:
            for start, end in bare:
                characters[start] = "{" + characters[start]
                characters[end - 1] += "}"
    return "".join(characters)
