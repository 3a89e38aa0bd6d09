r"""DAPO's rule as in verl 0.9.1 (Yu et al. 2025, arXiv:2503.14476).

The prompts ask for a last line "Answer: …". The last answer must equal the ground truth after both are
normalised, as in Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from rolemesh.rules.boxed import closing_braces
from rolemesh.rules.ground_truth import right_answers

ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
NONE = "[INVALID]"  # verl's answer of a response without one; it falls back to a box if a response says so, too
BOX_CHARS = 100

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
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    r"\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    r"\text{s}",
    r"\text{.}",
    "\\text{\ns}",
    r"\text{}^2",
    r"\text{}^3",
    "\\text{\n}",
    r"\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    r"\dots",
)


def compute_score(
    solution_str: str, ground_truth: Any, *, answer_chars: int | None = 300
) -> dict[str, float | str]:
    r"""Score 1.0 if the answer is correct, otherwise -1.0; acc is 1 or 0.

    The answer is the rest of the line after the last "Answer:" within the last `answer_chars` characters (None:
    anywhere). If there is none, it is the last \boxed{} of the last 100 of these, which must equal the ground
    truth as it is. pred is the answer as it is compared, "" if there is none.

    Raises:
        ValueError: the ground truth has an unknown form.
    """
    tail = solution_str if answer_chars is None else solution_str[-answer_chars:]
    answers = right_answers(ground_truth)
    found = ANSWER.findall(tail)
    pred = normalise(found[-1]) if found else NONE
    right = pred in [normalise(answer) for answer in answers]
    if pred == NONE:
        box = _last_box(tail[-BOX_CHARS:])
        pred, right = ("", right) if box is None else (box, box in answers)
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


def _last_box(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    rest = text[start + len(r"\boxed") :]
    end = closing_braces(rest).get(0)
    return None if start < 0 or end is None else rest[1:end]


def normalise(answer: str) -> str:
    r"""Convert equal answers to the same spelling.

    A left side, units, text and currency are removed, "\frac12" becomes "frac{1}{2}" with its backslash, and
    "1,000" becomes "1000".
    """
    answer = answer.split("=")[-1]
    for before, after in (*REPLACED, *((unit, "") for unit in UNITS)):
        answer = answer.replace(before, after)
    answer = _by_line(_between_dollars, answer)
    for command in ("text", "textbf", "overline"):
        answer = _by_line(partial(_unwrapped, command), answer)
    answer = _by_line(_unboxed, answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


# A regular expression like \\text\{(.*?)\} would be shorter than these functions. But if a command is opened
# many times and never closed, it searches for the end again from each opening, in quadratic time.


def _by_line(change: Callable[[str], str], text: str) -> str:
    return "\n".join(map(change, text.split("\n")))


def _between_dollars(line: str) -> str:
    """Return the text between the first two dollar signs, with them; the whole line if it has fewer."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def _unwrapped(command: str, line: str) -> str:
    r"""Remove each \command{ and the first } after it."""
    if rf"\{command}{{" not in line:
        return line
    closed, brace, rest = line.rpartition("}")  # no command is closed after the last }
    return re.sub(rf"\\{command}\{{([^}}]*)\}}", r"\1", closed + brace) + rest


def _unboxed(line: str) -> str:
    r"""Remove the first \boxed{ and the last }."""
    before, box, after = line.partition(r"\boxed{")
    content, brace, rest = after.rpartition("}")
    return before + content + rest if box and brace else line
