"""Checks an Arrow message by hand before Arrow parses it.

Arrow checks that a message points nowhere outside itself. It does not bound the result: parts may be shared, so
a few bytes can describe a million fields, or one long name can be the name of every column. A compressed buffer
states its own size. This module reads the parts that pyarrow does not expose.

Source: arrow/format/Message.fbs and Schema.fbs; flatbuffers internals (a table starts with the signed distance
to its vtable; the vtable is its size, the table's size, then each field's place in the table, 0 if absent).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from rolemesh.errors import InvalidBatch
from rolemesh.wire.limits import MAX_COLUMNS, MAX_NAME_BYTES, MAX_SCHEMA_BYTES

_CONTINUATION = 0xFFFFFFFF
_PREFIX_BYTES = 8
_INT = 2
_FLOATING_POINT = 3
_BOOL = 6
_LARGE_BINARY = 19
_LARGE_UTF8 = 20
_TYPES = {_INT, _FLOATING_POINT, _BOOL, _LARGE_BINARY, _LARGE_UTF8}
_MAX_ENCODING_BYTES = 96


@dataclass(frozen=True)
class _Table:
    flat: memoryview
    at: int

    def place(self, field: int) -> int:
        """Position of a field's value; 0 if the table lacks the field."""
        vtable = self.at - self._int("<i", self.at)
        slot = 4 + 2 * field
        if slot >= self._int("<H", vtable):
            return 0
        offset = self._int("<H", vtable + slot)
        return self.at + offset if offset else 0

    def table(self, field: int) -> _Table:
        place = self.place(field)
        if not place:
            raise InvalidBatch(f"the Arrow columns' description lacks field {field}")
        return _Table(self.flat, place + self._int("<I", place))

    def octet(self, field: int) -> int:
        place = self.place(field)
        return self._int("<B", place) if place else 0

    def length(self, field: int) -> int:
        """Length of a string or vector field; 0 if the table lacks it."""
        place = self.place(field)
        return self._int("<I", place + self._int("<I", place)) if place else 0

    def tables(self, field: int) -> Iterator[_Table]:
        """Yield the tables in a vector field; none if the table lacks it."""
        if not (place := self.place(field)):
            return
        vector = place + self._int("<I", place)
        for element in range(vector + 4, vector + 4 + 4 * self._int("<I", vector), 4):
            yield _Table(self.flat, element + self._int("<I", element))

    def _int(self, kind: str, at: int) -> int:
        return int(struct.unpack_from(kind, self.flat, at)[0])


def check_prefix(data: memoryview, at: int) -> int:
    """Return the size of an Arrow message up to its body: prefix and description.

    Raises:
        InvalidBatch: no message begins here, or its description exceeds MAX_SCHEMA_BYTES.
        struct.error: the data end within the prefix.
    """
    mark, num_bytes = struct.unpack_from("<II", data, at)
    if mark != _CONTINUATION or num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidBatch(
            f"the Arrow columns' description has {num_bytes} bytes after the mark {mark:#x}; expected the mark "
            f"{_CONTINUATION:#x}, and at most {MAX_SCHEMA_BYTES} are read"
        )
    return _PREFIX_BYTES + int(num_bytes)


def check_schema(metadata: memoryview) -> int:
    """Check a schema message and return its number of columns.

    Raises:
        InvalidBatch: more than MAX_COLUMNS columns, a name that is too long, a column type that is never sent,
            or metadata other than a column's encoding.
        struct.error: not a schema.
    """
    schema = _root(metadata).table(2)
    num_columns = schema.length(1)
    if num_columns > MAX_COLUMNS:
        raise InvalidBatch(f"a batch of {num_columns} non-tensor columns; at most {MAX_COLUMNS} can be sent")
    if schema.length(2):
        raise InvalidBatch("the Arrow schema has metadata as a whole; only its columns may have some")
    for field in schema.tables(1):
        if (num_bytes := field.length(0)) > MAX_NAME_BYTES:
            raise InvalidBatch(
                f"an Arrow column's name has {num_bytes} bytes, at most {MAX_NAME_BYTES} can be sent"
            )
        nested = field.length(5) or field.place(4)  # children, dictionary
        if nested or field.octet(2) not in _TYPES:
            raise InvalidBatch(f"an Arrow column is nested or of type {field.octet(2)}, which is not sent")
        if field.length(6) > 1 or any(
            max(pair.length(0), pair.length(1)) > _MAX_ENCODING_BYTES for pair in field.tables(6)
        ):
            raise InvalidBatch(
                f"an Arrow column has metadata besides its encoding, or a text of more than "
                f"{_MAX_ENCODING_BYTES} bytes there"
            )
    return num_columns


def is_compressed(metadata: memoryview) -> bool:
    """True if the record batch message sets RecordBatch.compression."""
    return _root(metadata).table(2).place(3) != 0


def _root(metadata: memoryview) -> _Table:
    return _Table(metadata, int(struct.unpack_from("<I", metadata, 0)[0]))
