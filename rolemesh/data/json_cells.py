"""Decodes JSON in data sets: lines of JSON Lines, and cells of Arrow's JSON type."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pyarrow as pa


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 64:
        raise ValueError(f"{text[:40]} has more than 64 bits; write it as text")
    return number


# Raises ValueError for what JSON, or a batch, cannot represent.
DECODER = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer)


def holds_json(kind: pa.DataType) -> bool:
    """Return whether this type is Arrow's JSON type, or holds it."""
    if isinstance(kind, pa.JsonType):
        return True
    return any(holds_json(kind.field(at).type) for at in range(kind.num_fields))


def decoded(cell: Any, kind: pa.DataType) -> Any:
    """Return a cell with the JSON in it decoded: Arrow gives the text of its JSON type.

    Raises:
        ValueError: the text is not JSON, or has a number that a batch cannot represent.
    """
    if cell is None or not holds_json(kind):
        return cell
    if isinstance(kind, pa.JsonType):
        value = DECODER.decode(cell)
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is not text
        return value
    if pa.types.is_struct(kind):
        return {key: decoded(inner, kind.field(key).type) for key, inner in cell.items()}
    if pa.types.is_map(kind):
        return [(key, decoded(inner, kind.item_type)) for key, inner in cell]
    return [decoded(inner, kind.field(0).type) for inner in cell]
