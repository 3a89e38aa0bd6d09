"""A batch from outside is held against its declaration (rolemesh/roles.py) before a method sees it.

A method may rely on what is declared: every column has its dtype and its shape, token ids are in the model's
vocabulary, masks are 0 or 1. On a GPU one id outside the vocabulary breaks the process for every later call.
What no declaration says, such as the order of padding and tokens in a row, stays the worker's to check.

The checks are numpy's, which works on the caller's thread alone: a thread of the server that used torch's
operators would have a team of OpenMP threads (rolemesh/workers/local.py).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.roles import COLUMNS, Column, Method, methods

# What an error adds to the name of an axis.
AXES = {
    "B": "the batch's rows",
    "P": "data.max_prompt_length",
    "T": "data.max_response_length",
    "S": "P + T",
    "K": "rollout.top_k",
    "C": "the number of algorithm.gdpo_reward_keys",
}


@dataclass(frozen=True)
class Door:
    """Lets a role's batches in.

    Args:
        methods: by the names of their rpcs.
        sizes: of the axes but B, and of the vocabulary V.
    """

    methods: Mapping[str, Method]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, job: JobConfig, role: str, vocabulary: int) -> Door:
        """The door of a job's role.

        Args:
            vocabulary: how many token ids the role's model knows.
        """
        prompt, response = job.data.max_prompt_length, job.data.max_response_length
        sizes = {"P": prompt, "T": response, "S": prompt + response, "V": vocabulary}
        sizes |= {"K": job.rollout.num_kept, "C": len(job.algorithm.gdpo_reward_keys)}
        return cls({method.rpc: method for method in methods(job).values() if method.role == role}, sizes)

    def check_claim(
        self, rpc: str, num_rows: int, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        """Holds the header of a batch that is about to arrive against the declaration: its rows, and of its
        tensors those that the method reads.

        Args:
            tensors: dtype and shape, by name.

        Raises:
            InvalidBatch: whatever comes after this header, `admit` would refuse it.
        """
        method = self.methods[rpc]
        where = f"{method.role}.{method.name}"
        read = [name for name in (*method.reads, *method.optional) if COLUMNS[name].dtype or name in tensors]
        if missing := [name for name in read if name not in tensors]:
            raise InvalidBatch(f"{where} needs tensors {missing}; got {sorted(tensors)}")
        if not num_rows:
            raise InvalidBatch(f"{where} needs a row or more; columns {sorted(tensors)} have none")
        sizes = {**self.sizes, "B": num_rows}
        for name in read:
            _check_tensor(f"{where}: column {name!r}", COLUMNS[name], *tensors[name], sizes)

    def admit(self, rpc: str, batch: DataProto) -> DataProto:
        """The columns and the meta_info that the method reads, and no others.

        Raises:
            InvalidBatch: the batch is not what the method takes. Names role, method, column, what was
                expected, what came, and where.
        """
        method = self.methods[rpc]
        batch = method.prune(batch)
        where = f"{method.role}.{method.name}"
        if not len(batch):
            raise InvalidBatch(f"{where} needs a row or more; columns {batch.columns} have none")
        sizes = {**self.sizes, "B": len(batch)}
        for name in batch.columns:
            _check_kind(f"{where}: column {name!r}", COLUMNS[name], batch[name], sizes)
        sampled = batch.tensors.get("response_mask")
        for name, tensor in batch.tensors.items():
            _check_values(f"{where}: column {name!r}", COLUMNS[name], tensor, sizes, sampled)
        meta = {key: _one_of(where, key, known, batch.meta_info) for key, known in method.meta.items()}
        return DataProto(batch.tensors, batch.non_tensors, meta)


def _check_kind(what: str, column: Column, value: Tensor | NDArray[Any], sizes: Mapping[str, int]) -> None:
    """Dtype and shape of a tensor, cells of another column."""
    if isinstance(value, Tensor):
        _check_tensor(what, column, value.dtype, tuple(value.shape), sizes)
    elif column.dtype is None:
        kind = column.cells.__name__
        for row, cell in enumerate(value):
            if type(cell) is not column.cells:
                got = f"{reprlib.repr(cell)} ({type(cell).__name__})"
                raise InvalidBatch(f"{what}, row {row}, is {got}; a {kind} expected")
    else:
        raise InvalidBatch(f"{what} is no tensor [{len(value)}]; {_expected(column, sizes)}")


def _check_tensor(
    what: str, column: Column, dtype: torch.dtype, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> None:
    if column.dtype is None:
        raise InvalidBatch(f"{what} is a tensor; a {column.cells.__name__} for each row expected")
    if (dtype, shape) != (column.dtype, tuple(sizes[axis] for axis in column.axes)):
        raise InvalidBatch(f"{what} is {dtype} {list(shape)}; {_expected(column, sizes)}")


def _expected(column: Column, sizes: Mapping[str, int]) -> str:
    axes = ", ".join(f"{axis} = {AXES[axis]}" for axis in column.axes)
    return f"{column.dtype} {[sizes[axis] for axis in column.axes]} expected ({axes})"


def _check_values(
    what: str, column: Column, tensor: Tensor, sizes: Mapping[str, int], sampled: Tensor | None
) -> None:
    """Integers in their range; floats finite, where tokens were sampled."""
    if column.values is None and not tensor.is_floating_point():
        return
    cells = tensor.numpy()
    least, most = cells.min(), cells.max()
    if column.values is not None:
        low, limit = column.values
        end = limit if isinstance(limit, int) else sizes[limit]
        if least < low or most >= end:
            at = np.argwhere((cells < low) | (cells >= end))[0]
            below = {"V": f"the vocabulary of {end}", "S": f"S = {end}"}.get(str(limit), str(end))
            raise InvalidBatch(f"{_at(what, at)} is {cells[tuple(at)]}; {low} or more, below {below}, expected")
    elif not (np.isfinite(least) and np.isfinite(most)):  # both are NaN where any cell is
        counts = sampled.numpy() if column.axes == "BT" and sampled is not None else True
        wrong = ~np.isfinite(cells) & counts
        if wrong.any():
            at = np.argwhere(wrong)[0]
            raise InvalidBatch(f"{_at(what, at)} is {cells[tuple(at)]}; a finite number expected")


def _at(what: str, index: NDArray[Any]) -> str:
    row, *inner = index.tolist()
    return f"{what}, row {row}, position {', '.join(map(str, inner))}," if inner else f"{what}, row {row},"


def _one_of(where: str, key: str, known: tuple[str, ...], meta: Mapping[str, Any]) -> str:
    value = meta.get(key)
    if not isinstance(value, str) or value not in known:
        got = reprlib.repr(value)
        raise InvalidBatch(f"{where}: meta_info[{key!r}] is {got}; one of {list(known)} expected")
    return value
