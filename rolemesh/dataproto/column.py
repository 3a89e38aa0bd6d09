"""Checks the columns of a batch, and joins the columns of several batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.dataproto.equality import same_value
from rolemesh.errors import InvalidBatch

Column = NDArray[Any]
C = TypeVar("C")


def as_column(values: Any) -> Column:
    """Convert values to a numpy array whose axis 0 is the rows.

    An array of numbers or bools is returned as it is, trailing axes included; so is an object array of one
    axis. Other values become an array [B]: bool, int64 or float64 if all cells have that type and fit, else
    object.

    Raises:
        InvalidBatch: an array without an axis.
    """
    if isinstance(values, np.ndarray):
        if (values.dtype.kind in "biuf" and values.ndim) or (values.dtype.kind == "O" and values.ndim == 1):
            return values
        if values.ndim == 0:
            raise InvalidBatch(f"a column needs one cell for each row; got the single value {values!r}")
    cells = values.tolist() if isinstance(values, np.ndarray) else list(values)
    kinds = set(map(type, cells))
    for kind, dtype in ((bool, np.bool_), (int, np.int64), (float, np.float64)):
        if kinds == {kind} and (kind is not int or all(-(2**63) <= cell < 2**63 for cell in cells)):
            return np.array(cells, dtype=dtype)
    return np.fromiter(cells, dtype=object, count=len(cells))


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise InvalidBatch if the tensor cannot be a column: nested, sparse or without an axis."""
    if tensor.is_nested:
        raise InvalidBatch(
            f"column {name!r} is a nested tensor; pad it with torch.nested.to_padded_tensor and add a mask "
            "(constant padding is not sent)"
        )
    if tensor.layout != torch.strided:
        raise InvalidBatch(
            f"column {name!r} has layout {tensor.layout}; a column must be a dense (strided) tensor"
        )
    if tensor.dim() == 0:
        raise InvalidBatch(f"column {name!r} has no axis; every tensor needs axis 0, the rows")


def positions(idxs: Any, num_rows: int) -> NDArray[np.int64]:
    """Convert a list or array of positions, or a mask of `num_rows` bools, to row numbers [N] int64.

    Negative positions count from the end.

    Raises:
        InvalidBatch: `idxs` is neither.
        IndexError: a position is out of range.
    """
    index = torch.as_tensor(idxs)
    if index.dtype == torch.bool:
        if index.shape != (num_rows,):
            raise InvalidBatch(f"a mask of shape {list(index.shape)} cannot select from {num_rows} rows")
        index = index.nonzero().flatten()
    if index.dim() != 1 or (len(index) and index.is_floating_point()):
        raise InvalidBatch(
            f"rows are selected by a list of integer positions or a mask; got {index.dtype} {list(index.shape)}"
        )
    at: NDArray[np.int64] = index.to(torch.int64).cpu().numpy()
    if len(at) and not -num_rows <= at.min() <= at.max() < num_rows:
        raise IndexError(f"rows {at.min()} to {at.max()} of a batch of {num_rows}")
    return at % max(num_rows, 1)


def merged(mine: dict[str, C], theirs: Mapping[str, C], same: Callable[[C, C], bool]) -> dict[str, C]:
    """Merge the columns of two batches by name. Raises InvalidBatch if two of one name differ."""
    for name in (name for name in theirs if name in mine):
        try:
            is_same = same(mine[name], theirs[name])
        except RecursionError:
            raise InvalidBatch(f"union: a cell of column {name!r} contains itself, or nests too deep") from None
        if not is_same:
            raise InvalidBatch(f"union: column {name!r} is in both batches with different values")
    return {**mine, **theirs}


def check_alike(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], names: set[str], other_names: set[str]
) -> None:
    """Raise InvalidBatch unless two batches can be concatenated.

    They need the same column names, and tensors of the same dtype and trailing shape.
    """
    if names != other_names:
        raise InvalidBatch(f"concat: one batch has {sorted(names)}, another {sorted(other_names)}")
    for name, tensor in mine.items():
        there = theirs.get(name)
        if there is None or there.shape[1:] != tensor.shape[1:] or there.dtype != tensor.dtype:
            raise InvalidBatch(f"concat: column {name!r} differs in kind, dtype or trailing shape")


def joined_meta(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the meta_info of concatenated batches: collect their metrics, and merge the other keys.

    Raises InvalidBatch if two batches have different values for a key other than "metrics".
    """
    meta: dict[str, Any] = {}
    if any("metrics" in part for part in parts):
        meta["metrics"] = joined_metrics([part.get("metrics") for part in parts])
    for part in parts:
        for key, value in part.items():
            if key != "metrics" and not same_value(meta.setdefault(key, value), value):
                raise InvalidBatch(f"concat: meta_info[{key!r}] is {meta[key]!r} here, {value!r} there")
    return meta


def joined_metrics(parts: Sequence[Any]) -> dict[str, list[Any]]:
    """Collect each metric's values over all parts. A part is a dict, a list of dicts, or None.

    Raises InvalidBatch if a part holds anything else.
    """
    joined: dict[str, list[Any]] = {}
    for part in parts:
        for metrics in part if isinstance(part, list) else [part or {}]:
            if not isinstance(metrics, dict):
                raise InvalidBatch(
                    f"concat: meta_info['metrics'] must be a dict or a list of dicts; got {metrics!r}"
                )
            for name, value in metrics.items():
                joined.setdefault(name, []).append(value)
    return joined


def joined_column(name: str, columns: Sequence[Column]) -> Column:
    """Concatenate columns. Arrays of different dtypes become object cells, so that no number is rounded.

    Raises InvalidBatch if the trailing shapes differ.
    """
    if len({column.shape[1:] for column in columns}) > 1:
        raise InvalidBatch(f"concat: column {name!r} differs in trailing shape: {[c.shape for c in columns]}")
    if len({column.dtype for column in columns}) > 1:
        columns = [column.astype(object) for column in columns]
    return np.concatenate(columns)
