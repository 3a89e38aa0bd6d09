"""GitHub's Markdown as Python-Markdown reads it: docs/ looks the same in the repository and on the site."""

from __future__ import annotations

import re

ITEM = re.compile(r" *(?:[-*+]|\d+\.) ")
FENCE = re.compile(r"( *)```")
CODE = re.compile(r"`[^`\n]*`")


def adapted(text: str) -> str:
    """Markdown with the differences between the two written out:

    - A list within a list is indented by 4, not by 2; what belongs to an item, too.
    - A list begins after an empty line.
    - A `\\|` in code of a table is a `|`.
    """
    lines: list[str] = []
    fence: str | None = None  # the indentation of the block of code that the line is in
    for line in text.split("\n"):
        found = FENCE.match(line)
        if fence is not None:
            lines.append(fence + line if line else line)
            fence = None if found else fence
            continue
        before = lines[-1] if lines else ""
        if ITEM.match(line) and before and not ITEM.match(before) and not before.startswith(" "):
            lines.append("")
        if line.startswith("|"):
            line = CODE.sub(lambda span: span[0].replace(r"\|", "|"), line)
        indentation = line[: len(line) - len(line.lstrip(" "))]
        lines.append(indentation + line)
        fence = found[1] if found else None
    return "\n".join(lines)
