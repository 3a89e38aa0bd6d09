r"""Finds the answer of a worked solution in mathematics, the last \boxed{…}."""

from __future__ import annotations

import re

END_OF_BARE_BOX = re.compile(r"\$|\\\)|\\\]|\n")


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
