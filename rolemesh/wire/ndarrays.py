"""Encodes numpy columns of several axes: each row's numbers become the bytes of one large_binary cell.

Such a column has the encoding `array:DTYPE:SHAPE`, e.g. `array:int32:3,4` for a numpy column [B, 3, 4].
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pyarrow as pa

from rolemesh.dataproto.column import Column
from rolemesh.errors import InvalidBatch

DTYPES = {
    np.dtype(name).name: np.dtype(f"<{name}" if name != "?" else name)
    for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}
_ENCODING = re.compile(
    r"array:([a-z0-9]{1,8}):(\d{1,10}(?:,\d{1,10}){0,6})"
)  # such a column has two axes or more


def to_cells(name: str, column: Column) -> tuple[Any, str]:
    """Convert a numpy column [B, ...] of numbers or bools to an Arrow array (row-major) and its encoding.

    Raises:
        InvalidBatch: an element type that cannot be sent, or more than eight axes.
    """
    dtype = DTYPES.get(column.dtype.name)
    encoding = f"array:{column.dtype.name}:{','.join(map(str, column.shape[1:]))}"
    if dtype is None or not _ENCODING.fullmatch(encoding):
        raise InvalidBatch(f"column {name!r} of dtype {column.dtype} and shape {column.shape} cannot be sent")
    rows = np.ascontiguousarray(column, dtype=dtype)
    width = dtype.itemsize * math.prod(column.shape[1:])
    offsets = np.arange(len(column) + 1, dtype="<i8") * width
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(rows.reshape(-1).view(np.uint8))]
    return pa.Array.from_buffers(pa.large_binary(), len(column), buffers), encoding


def is_encoding(encoding: str) -> bool:
    """True if `encoding` has the form `array:DTYPE:SHAPE` with a known dtype."""
    found = _ENCODING.fullmatch(encoding)
    return found is not None and found[1] in DTYPES


def from_cells(name: str, encoding: str, array: Any) -> Column:
    """Restore the column that `to_cells` was given.

    Args:
        name: the column's name, for errors.
        encoding: one that `is_encoding` accepts.
        array: a validated large_binary array.

    Raises:
        InvalidBatch: nulls, a cell whose size does not match the encoding, or a bool that is neither 0 nor 1.
    """
    found = _ENCODING.fullmatch(encoding)
    assert found is not None
    dtype = DTYPES[found[1]]
    shape = tuple(map(int, found[2].split(",")))
    width = dtype.itemsize * math.prod(shape)
    held = array.buffers()
    offsets = np.frombuffer(held[1] or b"", "<i8")[: len(array) + 1] if len(array) else np.zeros(1, "<i8")
    if array.null_count or array.offset or not np.array_equal(np.diff(offsets), np.full(len(array), width)):
        raise InvalidBatch(f"Arrow column {name!r}: not every cell has the {width} bytes of {encoding!r}")
    data = np.frombuffer(held[2] or b"", np.uint8, len(array) * width, int(offsets[0]))
    if dtype == np.bool_ and data.max(initial=0) > 1:
        raise InvalidBatch(f"column {name!r} is bool and holds {data.max()}")
    return data.copy().view(dtype).reshape(len(array), *shape)
