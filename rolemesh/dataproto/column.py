"""What a column of a batch may be, and how columns of several batches become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.dataproto.equality import same_array
from rolemesh.errors import InvalidBatch

Column = NDArray[Any]


def as_column(values: Any) -> Column:
    """A numpy array whose axis 0 is the rows.

    An array of numbers or bools stays as it is, trailing axes included. Strings, lists, dicts and None become
    cells of one axis.

    Raises:
        InvalidBatch: an array without an axis.
    """
    if isinstance(values, np.ndarray):
        if (values.dtype.kind in "biuf" and values.ndim) or (values.dtype.kind == "O" and values.ndim == 1):
            return values
        if values.ndim == 0:
            raise InvalidBatch(f"a column needs a cell for each row; got {values!r}")
    cells = values.tolist() if isinstance(values, np.ndarray) else list(values)
    kinds = set(map(type, cells))
    for kind, dtype in ((bool, np.bool_), (int, np.int64), (float, np.float64)):
        if kinds == {kind} and (kind is not int or all(-(2**63) <= cell < 2**63 for cell in cells)):
            return np.array(cells, dtype=dtype)
    return np.fromiter(cells, dtype=object, count=len(cells))


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raises InvalidBatch where the tensor cannot be a column: nested, sparse or without an axis."""
    if tensor.is_nested:
        raise InvalidBatch(
            f"column {name!r} is a nested tensor; pad it with torch.nested.to_padded_tensor and send a mask "
            "along (padding costs nothing on the wire)"
        )
    if tensor.layout != torch.strided:
        raise InvalidBatch(f"column {name!r} has layout {tensor.layout}; a column is a dense (strided) tensor")
    if tensor.dim() == 0:
        raise InvalidBatch(f"column {name!r} has no axis; every tensor needs axis 0, the rows")


def same_column(name: str, left: Column, right: Column) -> bool:
    """Equal dtype, shape and cells. Raises InvalidBatch where a cell contains itself."""
    try:
        return same_array(left, right)
    except RecursionError:
        raise InvalidBatch(f"union: a cell of column {name!r} contains itself, or nests too deep") from None


def joined_metrics(parts: Sequence[Any]) -> dict[str, list[Any]]:
    """Name to the values of all parts. A part is a dict, a list of dicts, or None."""
    joined: dict[str, list[Any]] = {}
    for part in parts:
        for metrics in part if isinstance(part, list) else [part or {}]:
            if not isinstance(metrics, dict):
                raise InvalidBatch(
                    f"concat: meta_info['metrics'] is a dict or a list of dicts; got {metrics!r}"
                )
            for name, value in metrics.items():
                joined.setdefault(name, []).append(value)
    return joined


def joined_column(name: str, columns: Sequence[Column]) -> Column:
    """One column of all cells. Arrays of different types become cells: no number is rounded to fit."""
    if len({column.shape[1:] for column in columns}) > 1:
        raise InvalidBatch(f"concat: column {name!r} differs in trailing shape: {[c.shape for c in columns]}")
    if len({column.dtype for column in columns}) > 1:
        columns = [column.astype(object) for column in columns]
    return np.concatenate(columns)
