"""What is read of an Arrow message by hand, before Arrow reads it.

Arrow checks that a message points nowhere beyond itself. It does not bound what comes of it: parts may be
shared, so that a few bytes are a million fields, or one long name is the name of every column; and a compressed
buffer states its own size. What pyarrow does not show is read here.

Source: arrow/format/Message.fbs and Schema.fbs; flatbuffers internals (a table starts with the signed distance
to its vtable; the vtable is its size, the table's size, then each field's place in the table, 0 if absent).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from rolemesh.errors import InvalidBatch
from rolemesh.wire.limits import MAX_COLUMNS, MAX_NAME_BYTES, MAX_SCHEMA_BYTES

_CONTINUATION, _PREFIX_BYTES = 0xFFFFFFFF, 8
_INT, _FLOATING_POINT, _BOOL, _LARGE_BINARY, _LARGE_UTF8 = 2, 3, 6, 19, 20
_TYPES = {_INT, _FLOATING_POINT, _BOOL, _LARGE_BINARY, _LARGE_UTF8}
_MAX_ENCODING_BYTES = 96


@dataclass(frozen=True)
class _Table:
    flat: memoryview
    at: int

    def place(self, field: int) -> int:
        """Where a field's value is; 0 if the table has none."""
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
        """Of a string or vector; 0 if there is none."""
        place = self.place(field)
        return self._int("<I", place + self._int("<I", place)) if place else 0

    def tables(self, field: int) -> Iterator[_Table]:
        """Those of a vector."""
        if not (place := self.place(field)):
            return
        vector = place + self._int("<I", place)
        for element in range(vector + 4, vector + 4 + 4 * self._int("<I", vector), 4):
            yield _Table(self.flat, element + self._int("<I", element))

    def _int(self, kind: str, at: int) -> int:
        return int(struct.unpack_from(kind, self.flat, at)[0])


def check_prefix(data: memoryview, at: int) -> int:
    """The bytes of an Arrow message up to its body.

    Raises:
        InvalidBatch: no message begins here, or one with a longer description than is read.
        struct.error: the data end before.
    """
    mark, num_bytes = struct.unpack_from("<II", data, at)
    if mark != _CONTINUATION or num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidBatch(
            f"the Arrow columns' description has {num_bytes} bytes after {mark:#x}; "
            f"at most {MAX_SCHEMA_BYTES} are read"
        )
    return _PREFIX_BYTES + int(num_bytes)


def check_schema(metadata: memoryview) -> int:
    """The number of columns of a schema's message.

    Raises:
        InvalidBatch: more than MAX_COLUMNS, a name that is too long, or a column of a type that is not sent.
        struct.error: not a schema.
    """
    schema = _root(metadata).table(2)
    num_columns = schema.length(1)
    if num_columns > MAX_COLUMNS:
        raise InvalidBatch(f"a batch of {num_columns} non-tensor columns; at most {MAX_COLUMNS} travel")
    if schema.length(2):
        raise InvalidBatch("the Arrow columns have metadata as a whole")
    for field in schema.tables(1):
        if (num_bytes := field.length(0)) > MAX_NAME_BYTES:
            raise InvalidBatch(f"an Arrow column's name has {num_bytes} bytes, at most {MAX_NAME_BYTES} travel")
        nested = field.length(5) or field.place(4)  # children, dictionary
        if nested or field.octet(2) not in _TYPES:
            raise InvalidBatch(f"an Arrow column is nested or of type {field.octet(2)}, which is not sent")
        if field.length(6) > 1 or any(
            max(pair.length(0), pair.length(1)) > _MAX_ENCODING_BYTES for pair in field.tables(6)
        ):
            raise InvalidBatch("an Arrow column has metadata beside its encoding")
    return num_columns


def is_compressed(metadata: memoryview) -> bool:
    """RecordBatch.compression of a record batch's message is there."""
    return _root(metadata).table(2).place(3) != 0


def _root(metadata: memoryview) -> _Table:
    return _Table(metadata, int(struct.unpack_from("<I", metadata, 0)[0]))
