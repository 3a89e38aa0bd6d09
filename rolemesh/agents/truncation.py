"""Cuts a tool's answer to the length that a job allows."""

from __future__ import annotations

from typing import Literal

CUT = "...(truncated)..."


def truncated(text: str, most: int, keep: Literal["left", "middle", "right"]) -> str:
    """Return at most `most` characters of a text, the mark for what is left out included.

    Args:
        text: the text.
        most: characters; where the mark has no room, it is left out too.
        keep: which part stays: its beginning (left), its end (right), or half from each side (middle).
    """
    if len(text) <= most:
        return text
    mark = {"left": CUT[:-3], "right": CUT[3:], "middle": CUT}[keep]
    mark = mark if len(mark) < most else ""
    left = {"left": most - len(mark), "right": 0, "middle": (most - len(mark) + 1) // 2}[keep]
    right = most - len(mark) - left
    return text[:left] + mark + text[len(text) - right :]
