r"""Finds the answer in a response: after "####", on an "Answer:" line, or in the last \boxed{}.

The last answer counts, even if it is malformed: a right answer that is taken back is none.
"""

from __future__ import annotations

import re

from rolemesh.rules.boxed import last_boxed
from rolemesh.rules.notation import FRACTIONS, FULL_WIDTH, RAISED
from rolemesh.rules.units import QUANTITY

# No two neighbours in these expressions share a character, or the first is possessive. So nothing backtracks
# over a text without a match.
BETWEEN = (  # two numbers of one line, which are then one answer: "3 1/2", "5 or 6", "5 \times 10^3"
    r"(?<!\.)(?:\{,\}|[ \t$*_+/^×·⋅÷√&:={}!`\"\u2212\u2013-]"
    r"|\\[A-Za-z]+|\\[,!;: ]|[eE](?=[-+]?[0-9])|(?i:x|or|and|to))++"
)
AFTER = rf"[ *_]*+(?:\\text\{{ ?)?(?:\\?pi|π|(?:{QUANTITY}|[kKMB]|bn)(?![A-Za-z]))|[A-Za-z](?![A-Za-z])"
SIGNS = "".join(sign[0] for sign in FRACTIONS) + RAISED
MARKED = re.compile(
    r"####((?:[-+\u2212$€£\s*_`\"({\[\\]|boxed|text(?:bf)?|mathbf)*)"
    rf"([0-9.,]+[{SIGNS}]*(?:{BETWEEN}[.,]?[0-9{SIGNS}][0-9.,{SIGNS}]*)*)({AFTER})?"
)
ONE_WIDTH = FULL_WIDTH | str.maketrans("～〜＾＊＿％、⁄∕~", "--^*_%,//-")  # "5~6" is a range, as is "5-6"
BULLET = re.compile(r"\n[ \t]*[-+*][ \t]")
LABEL = re.compile(r"answer[\s*_}]*[:：]", re.IGNORECASE)
OPENED = (("\\[", "\\]"), ("$$", "$$"))


def marked_number(text: str) -> str | None:
    """Return the number after the last "####" that one follows, with its sign and all that changes it.

    Emphasis, currency, bullets and delimiters before the number are left out. What changes the number is part
    of it: "12/5", "5 or 6", "5 million", "5x". None if no mark has a number.
    """
    marked = list(MARKED.finditer(text.translate(ONE_WIDTH)))
    if not marked:
        return None
    found = marked[-1]
    before = BULLET.sub("", found[1]).replace("\u2212", "-")
    signs = "".join(character for character in before if character in "+-")
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
