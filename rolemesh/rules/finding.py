r"""Finds the answer in a response: after "####", on an "Answer:" line, or in the last \boxed{}.

The last answer counts, even if it is malformed: a right answer that is taken back is none.
"""

from __future__ import annotations

import re

from rolemesh.rules.boxed import last_boxed

# No two neighbours in these expressions share a character, so nothing backtracks over a text without a match.
MARKED = re.compile(
    r"####((?:[-+$€£\s*_`({\[\\]|boxed|text(?:bf)?|mathbf)*)"
    r"([0-9.,]+(?:(?:\{,\}|,?\\[,!])[0-9.,]+)*)"
    r"((?:[eE][-+]?|[-+*/^×÷:])[0-9]+| ?(?:hundred|thousand|million|billion|trillion|dozen)\b)?"
)
LABEL = re.compile(r"answer[\s*_}]*[:：]", re.IGNORECASE)
OPENED = (("\\[", "\\]"), ("$$", "$$"))


def marked_number(text: str) -> str | None:
    """Return what stands after the last "####" that a number follows: its sign, digits, commas and periods.

    Emphasis, currency and delimiters before the number are left out. What changes the number is part of it: the
    answer of "#### 12/5" is "12/5". None if no mark has a number.
    """
    marked = list(MARKED.finditer(text))
    if not marked:
        return None
    found = marked[-1]
    signs = "".join(character for character in found[1] if character in "+-")
    return signs + found[2].rstrip(",.") + (found[3] or "")


def answer_line(text: str) -> str | None:
    r"""Return the rest of the line after the last "Answer:" that anything follows; None if there is none.

    If a displayed formula begins there ("\[" or "$$"), return all of it.
    """
    for found in reversed(list(LABEL.finditer(text))):
        rest = text[found.end() :].lstrip().removeprefix("}")
        if closing := re.match(r"(?:\*{1,3}|_{1,2})(?=\s|$)", rest):
            rest = rest[closing.end() :]
        rest = rest.lstrip()
        for opens, closes in OPENED:
            if rest.startswith(opens) and (end := rest.find(closes, len(opens))) > 0:
                return rest[: end + len(closes)]
        if rest:
            return rest.partition("\n")[0].strip()
    return None


def answer_of_line_or_box(text: str) -> str | None:
    r"""Return the answer of the last "Answer:" line, or, if there is none, of the last \boxed{}."""
    line = answer_line(text)
    return last_boxed(text) if line is None else line
