r"""MATH's rule: the last \boxed{} equals the ground truth after normalisation (Hendrycks et al. 2021,
arXiv:2103.03874: strings are compared after notational differences are taken out of both)."""

from __future__ import annotations

import re
from typing import Any

from services.reward.functions.ground_truth import right_answers

# What says nothing about the value, in the order in which it is taken out.
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
ARGUMENT = re.compile(r"\{|\\[A-Za-z]+|\S")


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""1.0 where the last \boxed{} of the response equals a right answer, else 0.0.

    Raises:
        ValueError: the ground truth is of no known form.
    """
    given = last_boxed(solution_str)
    answers = [normalise(answer) for answer in right_answers(ground_truth)]
    return float(given is not None and normalise(given) in answers)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…} or \fbox{…}, braces within it balanced, or of "\boxed 5"; None
    where there is none or its brace is never closed."""
    start, command = max((text.rfind(command), command) for command in (r"\boxed", r"\fbox"))
    if start < 0:
        return None
    rest = text[start + len(command) :]
    if rest.startswith(" "):
        return rest[1:].split("$")[0].strip() or None
    return braced(rest)


def braced(text: str) -> str | None:
    """The content of the {…} that the text begins with; None where there is none or it is not closed."""
    if not text.startswith("{"):
        return None
    depth = 0
    for at, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:at]
    return None


def normalise(answer: str) -> str:
    r"""One spelling for each answer: "\dfrac 12", "1/2" and "0.5" become "\frac{1}{2}"; signs of units,
    percent, degrees and currency, a short left side ("x = 5") and spaces go."""
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
    r"""Braces round the arguments of every \frac: "\frac12" and "\frac1{2}" become "\frac{1}{2}"."""
    head, command, rest = text.partition(r"\frac")
    if not command:
        return text
    arguments = []
    for _ in range(2):
        rest = rest.lstrip(" ")
        found = ARGUMENT.match(rest)
        if not found:
            return text
        argument = braced(rest) if found[0] == "{" else found[0]
        if argument is None:
            return text
        rest = rest[len(argument) + (2 if found[0] == "{" else 0) :]
        arguments.append(brace_fractions(argument))
    return f"{head}\\frac{{{arguments[0]}}}{{{arguments[1]}}}{brace_fractions(rest)}"
