r"""Finds the answer in a response: after "####", on an "Answer:" line, or in the last \boxed{}.

The last answer counts, even if it is malformed: a right answer that is taken back is none.
"""

from __future__ import annotations

import re

from rolemesh.rules.boxed import last_boxed
from rolemesh.rules.characters import changes_before, with_plain_digits
from rolemesh.rules.neighbours import TAG, last_of_neighbours
from rolemesh.rules.notation import FULL_WIDTH
from rolemesh.rules.trailing_text import CHANGED, JOINED, SIGNS, changing

WORDS = re.compile(
    r"[bf]?box(?:ed)?|text(?:bf|rm|it|sf)?|math(?:bf|rm|sf)"
    r"|\\(?:therefore|implies|(?:[Ll]ong)?[Rr]ightarrow)(?![A-Za-z])"
)
ARROW = re.compile("(?<![-=])[-=]++>")
FRACTION = r"\\[cdt]?frac\s*(?:\{[0-9]+\}|[0-9])\s*(?:\{[0-9]+\}|[0-9])"
MARKED = re.compile(
    rf"####((?:{WORDS.pattern}|(?!{FRACTION})[^\w#.,⁻]|_)*+)"
    rf"((?:{FRACTION}[0-9.,{SIGNS}]*|[0-9.,{SIGNS}]+){JOINED})({CHANGED})?"
)
SCRIPT = re.compile("<su[pb]>")
# In TeX "~" is a blank. In a text "5~6" is a range.
ONE_WIDTH = FULL_WIDTH | str.maketrans("～〜~＾＊＿％、⁄∕٫٬", "∼∼∼^*_%,//.,")
ONE_WIDTH |= dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2796\ufe58\ufe63"), "-")
ONE_WIDTH |= {ord(bracket): bracket for bracket in "（）"}  # they hold remarks, as in "18（6+12）"
ONE_WIDTH |= dict.fromkeys((0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000), " ")
DASH = re.compile("(?<=[A-Za-z])[\u2013\u2014\u2015](?=[A-Za-z])")  # in a sentence; a hyphen is part of a word
BULLET = re.compile(r"\n[ \t]*[-+*][ \t]")
LABEL = re.compile(r"answer[\s*_}]*[:：]", re.IGNORECASE)
# A sentence whose formula is the answer: "The sum is $5$.", "\\boxed{5}, because …".
FORMULA = r"\$[^$]+\$|\\\((?:(?!\\[()]).)+\\\)|\\boxed ?\{[^{}]*+(?:\{[^{}]*\}[^{}]*+)*+\}"
SENTENCE = re.compile(
    rf"(?:[A-Za-z]+(?: [A-Za-z]+){{0,9}} (?:is|are|equals):? )?({FORMULA})"
    r"(?:[.,;]? (?:because|since|as(?! +well +as(?![A-Za-z])))(?![A-Za-z]).*|\.(?: [^$\\0-9]*)?)?"
)
DISPLAYED = re.compile(r"(?:(?:\\\[.*?\\\]|\$\$.*?\$\$)[ \t]*+)+", re.DOTALL)


def marked_number(text: str) -> str | None:
    """Return the number after the last "####" that one follows, with its sign and all that changes it.

    Emphasis, currency, bullets and delimiters before the number are left out. What changes the number is part
    of it: "12/5", "5 or 6", "5 million", "5x". None if no mark has a number.
    """
    parts = DASH.sub(" - ", with_plain_digits(text)).translate(ONE_WIDTH).split("####")
    text = TAG.sub("*", SCRIPT.sub("^", "####".join(map(last_of_neighbours, parts))))
    marked = list(MARKED.finditer(text))
    if not marked:
        return None
    found = marked[-1]
    before = ARROW.sub("", WORDS.sub("", BULLET.sub("", found[1])))
    changed = "".join(character for character in before if changes_before(character))
    return changed + found[2].rstrip(",.") + (found[3] or changing(text, found.end()))


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
    r"""Return the answer of the last "Answer:" line, or, if there is none, of the last \boxed{}.

    Of a line that is a sentence it is the formula: "The sum is $5$.", "\boxed{5} because 2 + 3 = 5".
    """
    line = answer_line(text)
    if line is None:
        return last_boxed(text)
    found = SENTENCE.fullmatch(line)
    return found[1] if found else line
