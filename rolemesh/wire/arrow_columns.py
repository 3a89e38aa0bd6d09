"""Encode non-tensor columns as one Arrow record batch, and decode it.

The field metadata `encoding` of a column records its original kind: `array` (a numpy array of numbers or bools;
see ndarrays.py for several axes), `object` (cells of one Python type, or None) or `json` (other JSON-like
cells, one text each).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rolemesh.dataproto.column import Column
from rolemesh.errors import InvalidBatch
from rolemesh.wire import flatbuffer, ndarrays
from rolemesh.wire.json_text import from_json, num_values, num_values_at_most, to_json
from rolemesh.wire.limits import MAX_CELL_BYTES, MAX_VALUES

_CELLS: dict[type, Any] = {
    str: pa.large_string(),
    bytes: pa.large_binary(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
}
_ARRAYS = {pa.from_numpy_dtype(dtype): dtype for dtype in ndarrays.DTYPES.values()}
# Exceptions that untrusted bytes can cause in Arrow, in its flatbuffers and in our parsing of them.
_UNREADABLE = (pa.ArrowException, ValueError, OSError, EOFError, StopIteration, struct.error, OverflowError)

_END = b"\xff\xff\xff\xff\0\0\0\0"  # Arrow's end-of-stream mark, which may follow the record batch
SLICE = 4096  # cells made in one call, during which no other thread runs
# Above this many values, JSON texts are parsed once just to validate them, before any value is kept. Otherwise
# a batch with one invalid text would take memory for all the values before it.
CHECKED_FIRST = MAX_VALUES // 2

# --------------------------------------------------------------------------------------- sending


def to_arrow(columns: Mapping[str, Column]) -> memoryview:
    """Encode the columns as an Arrow IPC stream of one record batch; empty if there are no columns.

    Raises:
        InvalidBatch: a cell cannot be sent (the message names column, row and type), or there are more or
            larger cells than a receiver accepts.
    """
    if not columns:
        return memoryview(b"")
    _check_cells(len(next(iter(columns.values()))), len(columns))
    arrays = []
    fields = []
    for name, column in columns.items():
        array, encoding = _to_array(name, column)
        arrays.append(array)
        try:
            fields.append(pa.field(name, array.type, metadata={"encoding": encoding}))
        except UnicodeEncodeError as error:
            raise InvalidBatch(f"column name {name!r} is not valid Unicode: {error}") from None
    batch = pa.record_batch(arrays, schema=pa.schema(fields))
    _check_contents(batch)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _to_array(name: str, column: Column) -> tuple[Any, str]:
    if column.dtype != object and column.ndim > 1:
        return ndarrays.to_cells(name, column)
    if column.dtype != object:
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
            pass  # an integer beyond 64 bits or a lone surrogate: JSON can represent both
    texts = [to_json(cell, f"column {name!r}, row {row},") for row, cell in enumerate(cells)]
    return pa.array(texts, type=pa.large_string()), "json"


# ---------------------------------------------------------------------------------------- limits


def _check_cells(num_rows: int, num_columns: int) -> None:
    if num_rows * num_columns > MAX_VALUES:
        raise InvalidBatch(
            f"{num_columns} non-tensor columns of {num_rows} rows; one batch can have {MAX_VALUES} cells: "
            "make numbers a tensor, or send fewer rows"
        )


def _check_contents(batch: Any) -> bool:
    """Check cell sizes and the number of JSON values; True if the JSON texts must be validated before decoding.

    Raises:
        InvalidBatch: a cell is too large, or the cells hold too many JSON values.
    """
    json_arrays = []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        if field.type not in (pa.large_string(), pa.large_binary()):
            continue
        if len(array) and (largest := int(np.diff(_offsets(array)).max())) > MAX_CELL_BYTES:
            raise InvalidBatch(
                f"column {field.name!r} has a cell of {largest} bytes, at most {MAX_CELL_BYTES} can be sent"
            )
        if _encoding(field) == "json":
            json_arrays.append(array)
    total = sum(num_values_at_most(np.frombuffer(_data(array), np.uint8), len(array)) for array in json_arrays)
    if total > MAX_VALUES:
        total = sum(num_values(text) for array in json_arrays for text in _texts(array))
    if total > MAX_VALUES:
        raise InvalidBatch(f"the cells hold {total} JSON values, at most {MAX_VALUES} can be sent in one batch")
    return total > CHECKED_FIRST


# ------------------------------------------------------------------------------------- receiving


def from_arrow(data: memoryview, num_rows: int) -> dict[str, Column]:
    """Read the columns that `to_arrow` wrote.

    Raises:
        InvalidBatch: not an Arrow IPC stream of one record batch of `num_rows` rows; a column type that
            to_arrow does not write; an invalid buffer; text that is not UTF-8 or not JSON; more or larger cells
            than to_arrow writes.
    """
    if not len(data):
        return {}
    try:
        batch = _read_batch(data, num_rows)
        if batch.num_rows != num_rows:
            raise InvalidBatch(f"the Arrow columns have {batch.num_rows} rows, the header says {num_rows}")
        if len(set(batch.schema.names)) < batch.num_columns:
            raise InvalidBatch(f"two Arrow columns have one name: {batch.schema.names}")
        buffers = [buffer for array in batch.columns for buffer in array.buffers() if buffer is not None]
        if sum(buffer.size for buffer in buffers) > len(data):
            raise InvalidBatch("the Arrow columns share bytes")
        batch.validate(full=True)
        fields = list(zip(batch.schema, batch.columns, strict=True))
        if _check_contents(batch):
            for field, array in fields:
                if _encoding(field) == "json":
                    for _ in _json_cells(field, array):
                        pass
        return {field.name: _from_array(field, array) for field, array in fields}
    except InvalidBatch:
        raise
    except _UNREADABLE as error:
        raise InvalidBatch(f"the Arrow columns cannot be read: {error}") from None


def _read_batch(data: memoryview, num_rows: int) -> Any:
    after = flatbuffer.check_prefix(data, 0)
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data))
    message = messages.read_next_message()
    if message.type != "schema" or (message.body is not None and message.body.size):
        # Arrow verifies only the message types it knows; an unknown message may point anywhere.
        raise InvalidBatch(
            f"the Arrow columns begin with a message of type {message.type!r}, not with a schema"
        )
    _check_cells(num_rows, flatbuffer.check_schema(memoryview(message.metadata)))
    schema = pa.ipc.read_schema(message)
    for field in schema:
        _encoding(field)
    after += flatbuffer.check_prefix(data, after)
    message = messages.read_next_message()
    if message.type != "record batch" or flatbuffer.is_compressed(memoryview(message.metadata)):
        # A compressed buffer states its unpacked size, and Arrow allocates that without checking.
        raise InvalidBatch("the Arrow columns are not one uncompressed record batch")
    after += message.body.size if message.body is not None else 0
    if bytes(data[after : after + len(_END) + 1]) not in (_END, b""):
        raise InvalidBatch("the Arrow columns are more than one record batch")
    return pa.ipc.read_record_batch(message, schema)


def _encoding(field: Any) -> str:
    encoding: str = (field.metadata or {}).get(b"encoding", b"").decode("ascii", "replace")
    if ndarrays.is_encoding(encoding) and field.type == pa.large_binary():
        return encoding
    allowed = {"array": _ARRAYS, "object": _CELLS.values(), "json": (pa.large_string(),)}.get(encoding, ())
    if field.type not in allowed:
        raise InvalidBatch(
            f"Arrow column {field.name!r} is {field.type} with encoding {encoding!r}, which is never sent"
        )
    return encoding


def _from_array(field: Any, array: Any) -> Column:
    encoding = _encoding(field)
    if encoding == "array":
        if array.null_count:
            raise InvalidBatch(f"Arrow column {field.name!r} is an array with nulls")
        return np.array(array.to_numpy(zero_copy_only=False), dtype=_ARRAYS[field.type])
    if ndarrays.is_encoding(encoding):
        return ndarrays.from_cells(field.name, encoding, array)
    cells = _json_cells(field, array) if encoding == "json" else _object_cells(array)
    return np.fromiter(cells, dtype=object, count=len(array))


def _json_cells(field: Any, array: Any) -> Iterator[Any]:
    if array.null_count:
        raise InvalidBatch(f"Arrow column {field.name!r} lacks a JSON text")
    for row, text in enumerate(_texts(array)):
        try:
            yield from_json(text, "")
        except InvalidBatch as error:  # formats the name, up to 1 KiB, only for the bad cell
            raise InvalidBatch(f"column {field.name!r}, row {row},{error}") from None


def _object_cells(array: Any) -> Iterator[Any]:
    if array.type in (pa.large_string(), pa.large_binary()):
        cells = _texts(array) if array.type == pa.large_string() else _octets(array)
        if not array.null_count:
            return cells
        bits = np.unpackbits(np.frombuffer(array.buffers()[0], np.uint8), bitorder="little")
        valid = bits[array.offset : array.offset + len(array)]
        return (cell if there else None for cell, there in zip(cells, valid, strict=True))
    slices = (array.slice(first, SLICE) for first in range(0, len(array), SLICE))
    return chain.from_iterable(part.to_pylist() for part in slices)


def _texts(array: Any) -> Iterator[str]:
    return (str(piece, "utf-8") for piece in _pieces(array))


def _octets(array: Any) -> Iterator[bytes]:
    return (bytes(piece) for piece in _pieces(array))


def _pieces(array: Any) -> Iterator[memoryview]:
    """Yield each cell's bytes in a validated large_utf8 or large_binary array; a null's are arbitrary."""
    offsets = _offsets(array)
    data = _data(array)
    for first in range(0, len(array), SLICE):
        ends = offsets[first : first + SLICE + 1].tolist()
        for start, end in pairwise(ends):
            yield data[start:end]


def _data(array: Any) -> memoryview:
    held = array.buffers()[2]
    return memoryview(b"" if held is None else held)


def _offsets(array: Any) -> Any:
    held = array.buffers()[1]
    count = len(array) + 1 if len(array) else 0
    return np.frombuffer(b"" if held is None else held, "<i8", count, 8 * array.offset if count else 0)
