"""Converts JSON-like data to JSON text and back, within the limits."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolemesh.errors import InvalidBatch
from rolemesh.wire.limits import MAX_JSON_VALUES

MAX_DEPTH = 64  # nesting of lists and dicts; far below the interpreter's recursion limit
_MARKS = [np.uint8(ord(mark)) for mark in ",[{"]
BLOCK_BYTES = 1 << 18  # scanned at once


def to_json(value: Any, what: str) -> str:
    """Serialize a value made of dict, list, str, int, float, bool and None as JSON text.

    Floats that are not finite are written as Python does: NaN, Infinity, -Infinity.

    Args:
        value: what to serialize.
        what: names the place in errors.

    Raises:
        InvalidBatch: the value holds another type (or a subclass, which would not come back as such), a dict
            key that is not a str, nesting deeper than MAX_DEPTH, or more values than one text may hold.
    """
    _check_json(value, what, MAX_DEPTH)
    try:
        text = json.dumps(value, separators=(",", ":"))
    except ValueError as error:  # an integer with more digits than Python converts
        raise InvalidBatch(f"{what} cannot be sent: {error}") from None
    _check_values(text, what)
    return text


def _check_json(value: Any, what: str, depth: int) -> None:
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return
    if kind is not dict and kind is not list:
        raise InvalidBatch(
            f"{what} holds a {kind.__module__}.{kind.__qualname__}; JSON takes dict, list, str, int, float, "
            "bool and None"
        )
    if not depth:
        raise InvalidBatch(f"{what} nests deeper than {MAX_DEPTH} levels")
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise InvalidBatch(f"{what} has the key {key!r} ({type(key).__qualname__}); JSON keys are str")
    for inner in value.values() if kind is dict else value:
        _check_json(inner, what, depth - 1)


def from_json(text: str, what: str) -> Any:
    """Parse a JSON text.

    Raises:
        InvalidBatch: not JSON, nested too deep to parse, or more values than one text may hold.
    """
    _check_values(text, what)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidBatch(f"{what} is not JSON: {error}") from None


def _check_values(text: str, what: str) -> None:
    if len(text) > MAX_JSON_VALUES and (number := num_values(text)) > MAX_JSON_VALUES:
        raise InvalidBatch(
            f"{what} holds {number} JSON values, at most {MAX_JSON_VALUES} can be sent in one text; "
            "make numbers a tensor, or split the rest into more cells"
        )


def num_values(text: str) -> int:
    """Bound the number of values in a JSON text: 1, plus the commas and opening brackets outside strings."""
    bare = text.replace("\\\\", "").replace('\\"', "")
    if (quotes := bare.count('"')) > 4 * MAX_JSON_VALUES:  # two for a value, two for its key
        return quotes // 4
    return 1 + sum(part.count(",") + part.count("[") + part.count("{") for part in bare.split('"')[::2])


def num_values_at_most(texts: NDArray[np.uint8], num_texts: int) -> int:
    """Like `num_values` for many concatenated texts; much faster, but also counts within strings."""
    blocks = (texts[first : first + BLOCK_BYTES] for first in range(0, len(texts), BLOCK_BYTES))
    return num_texts + sum(int(np.count_nonzero(block == mark)) for block in blocks for mark in _MARKS)
