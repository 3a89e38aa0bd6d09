r"""MATH's rule: the last \boxed{} equals the ground truth after normalisation (Hendrycks et al. 2021,
arXiv:2103.03874: strings are compared after notational differences are taken out of both)."""

from __future__ import annotations

import re
from typing import Any

from rolemesh.services.reward.functions.ground_truth import right_answers

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
ARGUMENT = re.compile(r" *(\{|\\[A-Za-z]+|[^\s}])")


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""1.0 where the last \boxed{} of the response equals a right answer, else 0.0.

    Raises:
        ValueError: the ground truth is of no known form.
    """
    given = last_boxed(solution_str)
    answers = [normalise(answer) for answer in right_answers(ground_truth)]
    return float(given is not None and normalise(given) in answers)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…}, braces within it balanced, or of "\boxed 5"; without any, of the last
    \fbox{…}. None where there is neither or its brace is never closed."""
    command = r"\boxed" if r"\boxed" in text else r"\fbox"
    start = text.rfind(command)
    if start < 0:
        return None
    rest = text[start + len(command) :]
    if rest.startswith(" "):
        return rest[1:].split("$")[0].strip() or None
    end = closing_braces(rest).get(0)
    return None if end is None else rest[1:end]


def closing_braces(text: str) -> dict[int, int]:
    """Where each { that is closed is closed, by where it stands."""
    still_open: list[int] = []
    closing = {}
    for at, character in enumerate(text):
        if character == "{":
            still_open.append(at)
        elif character == "}" and still_open:
            closing[still_open.pop()] = at
    return closing


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
    r"""Braces round the arguments of every \frac: "\frac12" and "\frac1{2}" become "\frac{1}{2}". One whose
    arguments are not there, or not closed, is left as it is."""
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
