r"""DAPO's rule for mathematics (Yu et al. 2025, arXiv:2503.14476).

The prompts ask for a last line "Answer: …". The last answer must equal the ground truth after both are
normalised, as in Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from rolemesh.rules.boxed import last_boxed
from rolemesh.rules.ground_truth import right_answers

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


def compute_score(
    solution_str: str, ground_truth: Any, *, answer_chars: int | None = 300
) -> dict[str, float | str]:
    r"""Score 1.0 if the answer is correct, otherwise -1.0; acc is 1 or 0.

    The answer is the rest of the line after the last "Answer:", or, if there is none, the last \boxed{}. Both
    are searched in the last `answer_chars` characters (None: anywhere). pred is the normalised answer, "" if
    there is none.

    Raises:
        ValueError: the ground truth has an unknown form.
    """
    tail = solution_str if answer_chars is None else solution_str[-answer_chars:]
    found = ANSWER.findall(tail)
    given = found[-1] if found else last_boxed(tail)
    answers = [normalise(answer) for answer in right_answers(ground_truth)]
    pred = None if given is None else normalise(given)
    right = pred in answers
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred or ""}


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
