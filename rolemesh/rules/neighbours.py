r"""Two answers side by side, as in \boxed{1}\boxed{234} or <answer>1</answer><answer>234</answer>.

They are never read as one number: of two boxes, or two answers in tags, the last one counts. Other neighbours,
as in $1$ $234$, are a list.
"""

from __future__ import annotations

import re

from rolemesh.rules.boxed import closing_braces

NAMES = r"answer|ans|final|final[-_ ]answer|solution|result"
ATTRIBUTES = r"(?:\s[^<>]{0,100})?"
EMPHASIS = r"</?(?:b|strong|i|em|u|span|p|code)>"
TAG = re.compile(rf"</?(?:{NAMES}){ATTRIBUTES}>|{EMPHASIS}", re.IGNORECASE)
# A letter between "<" and ">" that no closing tag follows: 1<b>2, but not in is<b>5</b>.
INEQUALITIES = re.compile(
    r"(?<=[0-9A-Za-z)}])<([biup])>(?=[0-9A-Za-z(\\])(?![^<]*+(?:<(?!/?\1>)[^<]*+)*+</\1>)", re.IGNORECASE
)
BETWEEN = r"(?:[\s$*_`]|\\[()\[\]]|<br ?/?>)*+"
EARLIER_TAG = re.compile(
    rf"<({NAMES}){ATTRIBUTES}>(?:[^<]|<(?!/?\1\b))*+</\1>{BETWEEN}(?=<\1{ATTRIBUTES}>\s*+[^\s<])",
    re.IGNORECASE,
)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
NEXT_BOX = re.compile(rf"{BETWEEN}(?={BOX.pattern})")
# "3 $1/2$", "$3$ 1/2" and "\( 3 \) \( 1/2 \)" are mixed numbers. "$3$$1/2$" and "$1/2$ $3/4$" are lists.
MIXED = re.compile(
    rf"(?<![0-9./])(?:(?:\$|\\\()\s*([0-9]+)\s*(?:\$|\\\))|([0-9]+)(?:\s*(?:\$|\\\)|{EMPHASIS}))?)"
    rf"\s+(?:(?:\$|\\\(|{EMPHASIS})\s*)?(?=[0-9]+/[0-9]+(?![0-9/]))",
    re.IGNORECASE,
)
# Between the digits of two numbers these leave no blank, which could be a thousands sign.
BETWEEN_DIGITS = re.compile(
    rf"(?<=[0-9])\s*(?:(?:\\[()\[\]]|[$\u201c\u201d]|{TAG.pattern})\s*)++(?=[0-9])", re.IGNORECASE
)


def last_of_neighbours(text: str) -> str:
    r"""Leave out every \boxed{…} and every answer in tags that another one follows at once."""
    if "<" in text:
        text = EARLIER_TAG.sub("", text)
    boxes = list(BOX.finditer(text)) if "\\" in text else []
    if len(boxes) < 2:
        return text
    closing = closing_braces(text)
    kept = []
    at = 0
    for box in boxes:
        end = closing.get(box.end() - 1)
        if box.start() < at or end is None or not (found := NEXT_BOX.match(text, end + 1)):
            continue
        kept.append(text[at : box.start()])
        at = found.end()
    return "".join([*kept, text[at:]])
