"""The names that docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented_names() -> list[str]:
    """Return the names in the first columns of the tables, unchanged."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def undocumented(records: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the names in records of metrics.jsonl that the page does not explain.

    On the page, <n> and <k> are numbers, <source> may have slashes, and any other <name> is a word.
    """
    placeholders = {"<n>": r"\d+", "<k>": r"\d+", "<source>": r".+"}
    patterns = [
        "".join(
            placeholders.get(part, r"[^/]+") if part.startswith("<") else re.escape(part)
            for part in re.split(r"(<\w+>)", name)
        )
        for name in documented_names()
    ]
    known = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return sorted({name for record in records for name in record if not known.fullmatch(name)})
