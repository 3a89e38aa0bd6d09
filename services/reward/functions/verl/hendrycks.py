r"""MATH's rule as in verl 0.9.1: the last \boxed{} must equal the ground truth after notation is removed.

The notation is that of Hendrycks et al. 2021, arXiv:2103.03874 (MIT licence).
"""

from __future__ import annotations

from typing import Any

from rolemesh.rules.ground_truth import right_answers

REPLACED = (
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
)
UNIT = r"\text{ "


def compute_score(solution_str: str, ground_truth: Any) -> float:
    r"""Score 1.0 if the last \boxed{} of the response equals a correct answer, otherwise 0.0.

    Raises:
        ValueError: the ground truth has an unknown form.
    """
    answers = right_answers(ground_truth)
    given = last_box(solution_str)
    return float(given is not None and any(same(given, answer) for answer in answers))


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{…}; None if there is none, or if its brace is not closed.

    A \boxed with a blank goes before all others, and its content ends at the next dollar sign. An \fbox is
    not read.
    """
    if r"\boxed " in text:
        return text.rpartition(r"\boxed ")[2].partition("$")[0]
    start = text.rfind(r"\boxed")
    if start < 0:
        return None
    num_open = 0
    for end in range(start, len(text)):
        if text[end] == "{":
            num_open += 1
        elif text[end] == "}":
            num_open -= 1
            if num_open == 0:
                box = text[start : end + 1]
                return box[len(r"\boxed{") : -1] if box.startswith(r"\boxed{") else None
    return None


def same(one: str, other: str) -> bool:
    """Compare in the normal form, or as they are if one has none."""
    try:
        return normalise(one) == normalise(other)
    except ValueError:
        return one == other


def normalise(answer: str) -> str:
    r"""Remove notation that seldom changes the value.

    Raises:
        ValueError: the text has two units, or ends with \sqrt or \frac.
    """
    for spelling, plain in REPLACED:
        answer = answer.replace(spelling, plain)
    if answer.count(UNIT) > 1:
        raise ValueError("two units")
    answer = answer.partition(UNIT)[0].replace(r"\\%", "").replace(r"\%", "")
    answer = answer.replace(" .", " 0.").replace("{.", "{0.")
    if not answer:
        return answer
    if answer[0] == ".":
        answer = "0" + answer
    sides = answer.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        answer = sides[1]
    answer = _fractions(_roots(answer).replace(" ", ""))
    return _slash(r"\frac{1}{2}" if answer == "0.5" else answer)


def _roots(text: str) -> str:
    first, *rest = text.split(r"\sqrt")
    if "" in rest:
        raise ValueError(r"nothing after \sqrt")
    return first + "".join(r"\sqrt" + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in rest)


def _fractions(text: str) -> str:
    first, *rest = text.split(r"\frac")
    for part in rest:
        if not part:
            raise ValueError(r"nothing after \frac")
        if len(part) == 1 and part != "{":
            return text
    return first + "".join(r"\frac" + (part if part[0] == "{" else _braced(part)) for part in rest)


def _braced(part: str) -> str:
    one = part[0]
    other = part[1]
    after = part[2:]
    return f"{{{one}}}{other}{after}" if other == "{" else f"{{{one}}}{{{other}}}{after}"


def _slash(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 2:
        return text
    try:
        above = int(parts[0])
        below = int(parts[1])
    except ValueError:
        return text
    return rf"\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
