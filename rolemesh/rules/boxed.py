r"""Finds boxes and tags: the last \boxed{…}, and the last of two answers side by side.

Neighbours as in \boxed{1}\boxed{234} or <answer>1</answer><answer>234</answer> are never read as one number:
the last one counts. Other neighbours, as in $1$ $234$, are a list.
"""

from __future__ import annotations

import re

END_OF_BARE_BOX = re.compile(r"\$|\\\)|\\\]|\n")
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


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{…}, with balanced braces, or of "\boxed 5".

    Blanks before the brace do not matter, as in TeX. If there is no \boxed, use the last \fbox{…}. None if
    there is neither, or if its brace is not closed.
    """
    command = r"\boxed" if r"\boxed" in text else r"\fbox"
    start = text.rfind(command)
    if start < 0:
        return None
    after = text[start + len(command) :]
    rest = after.lstrip()
    if rest.startswith("{"):
        end = closing_braces(rest).get(0)
        return None if end is None else rest[1:end]
    if rest == after:
        return None
    return END_OF_BARE_BOX.split(rest, maxsplit=1)[0].strip() or None


def closing_braces(text: str) -> dict[int, int]:
    """Map the position of each { that is closed to the position of its }."""
    still_open: list[int] = []
    closing = {}
    for at, character in enumerate(text):
        if character == "{":
            still_open.append(at)
        elif character == "}" and still_open:
            closing[still_open.pop()] = at
    return closing


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
