r"""Finds the answer in a response: after "####", on an "Answer:" line, or in the last \boxed{}.

The last answer counts, even if it is malformed: a right answer that is taken back is none.
"""

from __future__ import annotations

import re

from rolemesh.rules.boxed import last_boxed
from rolemesh.rules.characters import (
    FRACTIONS,
    changes_after,
    changes_before,
    multiplies,
    with_plain_digits,
)
from rolemesh.rules.neighbours import TAG, last_of_neighbours
from rolemesh.rules.notation import FULL_WIDTH, RAISED
from rolemesh.rules.units import QUANTITY

# No two neighbours in these expressions share a character, or the first is possessive. So nothing backtracks
# over a text without a match.
BETWEEN = (  # two numbers of one line, which are then one answer: "3 1/2", "5 or 6", "5 \times 10^3"
    r"(?<!\.)(?:\{,\}|[ \t$,*_+/^×·⋅÷√&:={}!`\"<>|±\u2190-\u22ff\u2013-]"
    r"|\\[A-Za-z]+|\\[,!;: ()\[\]]|[eE](?=[-+]?[0-9])|(?i:x|or|and|to|vs\.?|point)|;)++"
)
# Signs, or one letter, and no blank: "5;6", "5万6", "5a6". In "5元，每天6" words follow.
GLUED = r"(?:[^\w\s#。]|_|#(?!###))++(?=[0-9])|[^\W0-9](?=[0-9])"
MULTIPLE = rf"\\?pi|π|(?:{QUANTITY}|[kKMB]|bn)(?![A-Za-z])"
AFTER = rf"[ *_]*+(?:\\text\{{ ?)?(?:and an? )?(?:{MULTIPLE})|[A-Za-z](?![A-Za-z])|\+"
FRACTION = r"\\[cdt]?frac\s*(?:\{[0-9]+\}|[0-9])\s*(?:\{[0-9]+\}|[0-9])"
SIGNS = "".join(FRACTIONS) + RAISED
WORDS = re.compile(r"[bf]?box(?:ed)?|text(?:bf)?|mathbf")
MARKED = re.compile(
    rf"####((?:{WORDS.pattern}|(?!{FRACTION})[^\w#.,⁻]|_)*+)"
    rf"((?:{FRACTION}[0-9.,{SIGNS}]*|[0-9.,{SIGNS}]+)(?:(?:{BETWEEN}|{GLUED})[.,]?[0-9{SIGNS}][0-9.,{SIGNS}]*)*)({AFTER})?"
)
# In TeX "~" is a blank. In a text "5~6" is a range.
ONE_WIDTH = FULL_WIDTH | str.maketrans("～〜~＾＊＿％、⁄∕٫٬", "∼∼∼^*_%,//.,")
ONE_WIDTH |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2796\ufe58\ufe63"), "-")
ONE_WIDTH |= dict.fromkeys((0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000), " ")
BULLET = re.compile(r"\n[ \t]*[-+*][ \t]")
LABEL = re.compile(r"answer[\s*_}]*[:：]", re.IGNORECASE)
DISPLAYED = re.compile(r"(?:(?:\\\[.*?\\\]|\$\$.*?\$\$)[ \t]*+)+", re.DOTALL)


def marked_number(text: str) -> str | None:
    """Return the number after the last "####" that one follows, with its sign and all that changes it.

    Emphasis, currency, bullets and delimiters before the number are left out. What changes the number is part
    of it: "12/5", "5 or 6", "5 million", "5x". None if no mark has a number.
    """
    parts = with_plain_digits(text).translate(ONE_WIDTH).split("####")
    text = TAG.sub("*", "####".join(map(last_of_neighbours, parts)))
    marked = list(MARKED.finditer(text))
    if not marked:
        return None
    found = marked[-1]
    before = WORDS.sub("", BULLET.sub("", found[1]))
    changed = "".join(character for character in before if changes_before(character))
    return changed + found[2].rstrip(",.") + (found[3] or _changing(text, found.end()))


def _changing(text: str, end: int) -> str:
    """Return the character that changes the number which ends before it, or before blanks; "" if none does."""
    touching = text[end : end + 8].lstrip("*_")
    if touching and changes_after(touching):
        return touching[0]
    apart = touching.lstrip(" *_")
    return apart[0] if apart and text[end - 1] not in ".," and multiplies(apart) else ""


def answer_line(text: str) -> str | None:
    r"""Return the rest of the line after the last "Answer:" that anything follows; None if there is none.

    If displayed formulas begin there ("\[" or "$$"), return all of them.
    """
    for found in reversed(list(LABEL.finditer(text))):
        rest = text[found.end() :].lstrip().removeprefix("}")
        if closing := re.match(r"(?:\*{1,3}|_{1,2})(?=\s|$)", rest):
            rest = rest[closing.end() :]
        rest = rest.lstrip()
        if formulas := DISPLAYED.match(rest):
            return formulas[0].rstrip()
        if rest:
            return rest.partition("\n")[0].strip()
    return None


def answer_of_line_or_box(text: str) -> str | None:
    r"""Return the answer of the last "Answer:" line, or, if there is none, of the last \boxed{}."""
    line = answer_line(text)
    return last_boxed(text) if line is None else line
