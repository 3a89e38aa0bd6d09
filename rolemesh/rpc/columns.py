"""Non-tensor columns as one Arrow record batch, and JSON-like data as JSON.

A column's field metadata `encoding` says what it was: `array` (a numpy array of numbers or bools), `object`
(cells of one Python type, or None) or `json` (anything else that is JSON-like, one text a cell).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from rolemesh.column import Column
from rolemesh.errors import InvalidBatch

MAX_DEPTH = 64  # of lists and dicts in one another; far from the interpreter's recursion limit

_CELLS: dict[type, Any] = {
    str: pa.large_string(),
    bytes: pa.large_binary(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
}
_ARRAYS = {
    pa.from_numpy_dtype(dtype): np.dtype(dtype)
    for dtype in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}
# What a stranger's bytes can make Arrow, its flatbuffers and our reading of them raise.
_UNREADABLE = (pa.ArrowException, ValueError, OSError, EOFError, StopIteration, struct.error, OverflowError)


# ------------------------------------------------------------------------------------------ JSON


def to_json(value: Any, what: str) -> str:
    """JSON text of a value made of dict, list, str, int, float, bool and None. Floats that are not finite are
    written as Python does: NaN, Infinity, -Infinity.

    Raises:
        InvalidBatch: another type (its subclasses too, since they would not come back), a dict key that is
            not a str, or a nesting deeper than MAX_DEPTH. `what` names the place.
    """
    _check_json(value, what, MAX_DEPTH)
    try:
        return json.dumps(value, separators=(",", ":"))
    except ValueError as error:  # an integer of more digits than Python prints
        raise InvalidBatch(f"{what} cannot be sent: {error}") from None


def _check_json(value: Any, what: str, depth: int) -> None:
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or value is None:
        return
    if kind is not dict and kind is not list:
        raise InvalidBatch(f"{what} holds a {kind.__module__}.{kind.__qualname__}, which JSON has no place for")
    if not depth:
        raise InvalidBatch(f"{what} nests deeper than {MAX_DEPTH} levels")
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise InvalidBatch(f"{what} has the key {key!r} ({type(key).__qualname__}); JSON's are str")
    for inner in value.values() if kind is dict else value:
        _check_json(inner, what, depth - 1)


def from_json(text: str, what: str) -> Any:
    """The value of a JSON text.

    Raises:
        InvalidBatch: not JSON, or nested too deep to read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidBatch(f"{what} is not JSON: {error}") from None


# ----------------------------------------------------------------------------------------- Arrow


def to_arrow(columns: Mapping[str, Column]) -> memoryview:
    """An Arrow IPC stream of one record batch; empty where there are no columns.

    Raises:
        InvalidBatch: a cell that has no place on the wire; names column, row and type.
    """
    if not columns:
        return memoryview(b"")
    arrays, fields = [], []
    for name, column in columns.items():
        array, encoding = _to_array(name, column)
        arrays.append(array)
        try:
            fields.append(pa.field(name, array.type, metadata={"encoding": encoding}))
        except UnicodeEncodeError as error:
            raise InvalidBatch(f"column name {name!r} is not valid Unicode: {error}") from None
    batch = pa.record_batch(arrays, schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _to_array(name: str, column: Column) -> tuple[Any, str]:
    if column.dtype != object and column.ndim == 1:
        native = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("="))
        if native.dtype not in _ARRAYS.values():
            raise InvalidBatch(f"column {name!r} of dtype {column.dtype} cannot be sent")
        return pa.array(native, from_pandas=False), "array"
    cells = column.tolist()
    kinds = {type(cell) for cell in cells} - {type(None)}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in _CELLS or not cells or all(cell is None for cell in cells):
        try:
            return pa.array(cells, type=_CELLS[kind or str], from_pandas=False), "object"
        except (OverflowError, UnicodeEncodeError, pa.ArrowInvalid):
            pass  # an integer beyond 64 bits, a lone surrogate: JSON holds both
    texts = [to_json(cell, f"column {name!r}, row {row},") for row, cell in enumerate(cells)]
    return pa.array(texts, type=pa.large_string()), "json"


def from_arrow(data: memoryview, num_rows: int) -> dict[str, Column]:
    """The columns that `to_arrow` wrote.

    Raises:
        InvalidBatch: not an Arrow IPC stream of one record batch of `num_rows` rows, a column type that
            to_arrow does not write, an invalid buffer, text that is not UTF-8 or not JSON.
    """
    if not len(data):
        return {}
    try:
        batch = _read_batch(data)
        if batch.num_rows != num_rows:
            raise InvalidBatch(f"the Arrow columns have {batch.num_rows} rows, the header says {num_rows}")
        if len(set(batch.schema.names)) < batch.num_columns:
            raise InvalidBatch(f"two Arrow columns have one name: {batch.schema.names}")
        batch.validate(full=True)
        return {
            field.name: _from_array(field, array)
            for field, array in zip(batch.schema, batch.columns, strict=True)
        }
    except InvalidBatch:
        raise
    except _UNREADABLE as error:
        raise InvalidBatch(f"the Arrow columns cannot be read: {error}") from None


def _read_batch(data: memoryview) -> Any:
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data))
    message = messages.read_next_message()
    if message.type != "schema":  # Arrow verifies what it knows; an unknown message may point anywhere
        raise InvalidBatch(
            f"the Arrow columns begin with a message of type {message.type!r}, not with a schema"
        )
    schema = pa.ipc.read_schema(message)
    for field in schema:
        _encoding(field)  # before the body is looked at: nested and dictionary types never are
    message = messages.read_next_message()
    if message.type != "record batch" or _is_compressed(message.metadata):
        # Compressed buffers state the size that they unpack to, and Arrow takes that memory unseen.
        raise InvalidBatch("the Arrow columns are not one uncompressed record batch")
    batch = pa.ipc.read_record_batch(message, schema)
    try:
        messages.read_next_message()
    except StopIteration:
        return batch
    raise InvalidBatch("the Arrow columns are more than one record batch")


def _is_compressed(metadata: Any) -> bool:
    """Reads RecordBatch.compression of an Arrow message (a flatbuffer), which pyarrow does not show.

    Source: arrow/format/Message.fbs; flatbuffers internals (a table starts with the signed distance to its
    vtable; the vtable is its size, the table's size, then each field's place in the table, 0 if absent).
    """
    flat = memoryview(metadata)

    def place(table: int, field: int) -> int:
        vtable = table - int(struct.unpack_from("<i", flat, table)[0])
        slot = 4 + 2 * field
        if slot >= struct.unpack_from("<H", flat, vtable)[0]:
            return 0
        offset = int(struct.unpack_from("<H", flat, vtable + slot)[0])
        return table + offset if offset else 0

    message = int(struct.unpack_from("<I", flat, 0)[0])
    header = place(message, 2)
    record_batch = header + int(struct.unpack_from("<I", flat, header)[0])
    return place(record_batch, 3) != 0


def _encoding(field: Any) -> str:
    encoding: str = (field.metadata or {}).get(b"encoding", b"").decode("ascii", "replace")
    allowed = {"array": _ARRAYS, "object": _CELLS.values(), "json": (pa.large_string(),)}.get(encoding, ())
    if field.type not in allowed:
        raise InvalidBatch(f"Arrow column {field.name!r}: no {field.type} with encoding {encoding!r}")
    return encoding


def _from_array(field: Any, array: Any) -> Column:
    encoding = _encoding(field)
    if encoding == "array":
        if array.null_count:
            raise InvalidBatch(f"Arrow column {field.name!r} is an array with nulls")
        return np.array(array.to_numpy(zero_copy_only=False), dtype=_ARRAYS[field.type])
    cells = array.to_pylist()
    if encoding == "json":
        if array.null_count:
            raise InvalidBatch(f"Arrow column {field.name!r} lacks a JSON text")
        cells = [from_json(cell, f"column {field.name!r}, row {row},") for row, cell in enumerate(cells)]
    return np.fromiter(cells, dtype=object, count=len(cells))
