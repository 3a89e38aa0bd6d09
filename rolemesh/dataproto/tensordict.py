"""Converts DataProto to torch's TensorDict and back, for code that takes one. Needs the extra `tensordict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

try:
    from tensordict import NonTensorData, NonTensorStack, TensorDict
except ImportError as error:
    from rolemesh.errors import Unsupported

    raise Unsupported("tensordict is not installed: pip install 'rolemesh[tensordict]'") from error

from rolemesh.dataproto.column import Column, as_column
from rolemesh.errors import InvalidBatch


def to_tensordict(
    tensors: Mapping[str, Tensor], columns: Mapping[str, Column], meta_info: Mapping[str, Any], num_rows: int
) -> TensorDict:
    """Build a TensorDict of tensors (shared, not copied), other columns and meta.

    Each non-tensor column becomes a NonTensorStack, each key of meta_info a NonTensorData.
    Cells of numeric columns are numpy scalars (arrays for several axes), so that they keep their dtype.

    Raises:
        InvalidBatch: a name is both a column and a meta_info key.
    """
    if both := (tensors.keys() | columns.keys()) & meta_info.keys():
        raise InvalidBatch(
            f"{sorted(both)} are both columns and meta_info keys; a TensorDict can hold each name once"
        )
    entries: dict[str, Any] = dict(tensors)
    for name, column in columns.items():
        cells: list[Any] = [NonTensorData(cell) for cell in column]
        entries[name] = NonTensorStack.from_list(cells)
    entries |= {key: NonTensorData(value) for key, value in meta_info.items()}
    return TensorDict(entries, batch_size=[num_rows])


def from_tensordict(data: TensorDict) -> tuple[dict[str, Tensor], dict[str, Column], dict[str, Any]]:
    """Return the tensors, other columns and meta_info of a TensorDict, made by `to_tensordict` or otherwise.

    It must have one batch axis, and hold only tensors and non-tensor data.

    Raises:
        InvalidBatch: another number of batch axes, or a nested TensorDict.
    """
    if len(data.batch_size) != 1:
        raise InvalidBatch(
            f"expected a TensorDict with one batch axis, the rows; it has batch_size {list(data.batch_size)}"
        )
    tensors: dict[str, Any] = {}
    columns: dict[str, Column] = {}
    meta: dict[str, Any] = {}
    for name, entry in data.items():
        if isinstance(entry, NonTensorStack):
            columns[name] = _column(entry.tolist(convert_tensors=False))
        elif isinstance(entry, NonTensorData):
            meta[name] = entry.data
        elif isinstance(entry, TensorDict):
            raise InvalidBatch(f"entry {name!r} is a nested TensorDict; flatten it with data.flatten_keys()")
        else:
            tensors[name] = entry
    return tensors, columns, meta


def _column(cells: list[Any]) -> Column:
    dtypes = {cell.dtype for cell in cells if isinstance(cell, np.generic | np.ndarray)}
    if len(dtypes) == 1 and all(isinstance(cell, np.generic | np.ndarray) for cell in cells):
        return as_column(np.stack(cells))
    return as_column(cells)
