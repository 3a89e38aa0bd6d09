"""Checks batches from outside against their declaration (rolemesh/methods.py).

A request is checked before the method sees it, an answer before the caller does. So both can rely on the
declaration: every column has its dtype and shape, token ids are in the model's vocabulary, masks are 0 or 1. On
a GPU, one id outside the vocabulary breaks the process for every later call. One score that is not finite ruins
the policy. The worker checks rules that no declaration states, such as the order of padding and tokens in
a row.

The checks use numpy, which runs only on the caller's thread. torch's operators would start a team of OpenMP
threads for each thread of the server that calls them (rolemesh/workers/worker_context.py).
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

from rolemesh.columns import COLUMNS, OTHER, Column
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, RoleFailed
from rolemesh.methods import Method

# The meaning of each axis, for errors.
AXES = {
    "B": "the batch's rows",
    "P": "data.max_prompt_length",
    "T": "data.max_response_length",
    "S": "P + T",
    "K": "rollout.top_k",
    "C": "the number of algorithm.gdpo_reward_keys",
}
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class BatchValidator:
    """Checks the batches that enter a role, and its answers.

    Args:
        methods: the role's methods, by the name of their rpc.
        vocabulary: number of token ids of the role's model; None: unknown, and ids have no upper bound.
    """

    methods: Mapping[str, Method]
    vocabulary: int | None = None

    @classmethod
    def of(cls, methods: Mapping[str, Method], role: str, vocabulary: int | None) -> BatchValidator:
        """Make the validator of a role.

        Args:
            methods: rolemesh.methods.methods(job).
            role: the role.
            vocabulary: number of token ids of the role's model; None: unknown.
        """
        return cls({method.rpc: method for method in methods.values() if method.role == role}, vocabulary)

    def check_header(
        self, rpc: str, num_rows: int, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        """Check the header of an arriving batch: its rows, and the tensors that the method reads.

        Args:
            rpc: name of the rpc.
            num_rows: rows of the batch.
            tensors: dtype and shape, by name.

        Raises:
            InvalidBatch: `check_request` would refuse any batch with this header. The message lacks role and
                method; the caller adds them.
        """
        method = self.methods[rpc]
        read = [name for name in method.reads if COLUMNS[name].dtype or name in tensors]
        read += [name for name in method.optional if name in tensors]
        if missing := [name for name in read if name not in tensors]:
            raise InvalidBatch(f"needs tensors {missing}; got {sorted(tensors)}")
        if not num_rows:
            raise InvalidBatch(f"needs at least one row; columns {sorted(tensors)} have none")
        sizes = {**method.sizes, "B": num_rows}
        for name in read:
            _check_tensor(f"column {name!r}", COLUMNS[name], *tensors[name], sizes)

    def check_request(self, rpc: str, batch: DataProto) -> DataProto:
        """Check a request, and return it with only the columns and the meta_info that the method reads.

        Raises:
            InvalidBatch: the batch does not match the declaration. The message names role, method, column and
                position, what was expected and what came.
        """
        method = self.methods[rpc]
        batch = method.prune(batch)
        where = f"{method.role}.{method.name}"
        if not len(batch):
            raise InvalidBatch(f"{where} needs at least one row; columns {batch.columns} have none")
        self._check(where, method, batch, batch.tensors.get("response_mask"))
        meta = {key: _one_of(where, key, known, batch.meta_info) for key, known in method.meta.items()}
        return DataProto(batch.tensors, batch.non_tensors, meta)

    def check_answer_header(
        self,
        rpc: str,
        num_rows: int,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        request: DataProto,
    ) -> None:
        """Check the header of an arriving answer, or of a part of a streamed one: its rows, and its tensors.

        Args:
            rpc: name of the rpc.
            num_rows: rows of the answer.
            tensors: dtype and shape, by name.
            request: the request.

        Raises:
            RoleFailed: `check_answer` would refuse any answer with this header, or it has more rows than the
                request.
        """
        method = self.methods[rpc]
        where = f"the answer of {method.role}.{method.name}"
        expected = method.answers(request.meta_info)
        sizes = {**method.sizes, "B": num_rows}
        try:
            if foreign := sorted(set(tensors) - set(expected)):
                raise InvalidBatch(f"{where} has columns {foreign} besides {sorted(expected)}")
            if missing := [name for name in expected if COLUMNS[name].dtype and name not in tensors]:
                raise InvalidBatch(f"{where} lacks tensors {missing}; got {sorted(tensors)}")
            least = 1 if "row" in expected else len(request)
            if not least <= num_rows <= len(request):
                raise InvalidBatch(f"{where}: {len(request)} rows were asked for, {num_rows} came")
            for name, (dtype, shape) in tensors.items():
                _check_tensor(f"{where}: column {name!r}", COLUMNS[name], dtype, shape, sizes)
        except InvalidBatch as error:
            raise RoleFailed(str(error)) from error

    def check_answer(self, rpc: str, answer: DataProto, request: DataProto) -> None:
        """Check an answer, or a part of a streamed answer, whose column `row` names the request's rows.

        Args:
            rpc: name of the rpc.
            answer: the answer or part.
            request: the request. In columns [B, T], floats must be finite where response_mask is True, and
                scores 0 elsewhere. The mask is the answer's, if it has one, else the request's.

        Raises:
            RoleFailed: the answer does not match the declaration: a column is missing, undeclared or invalid,
                the number of rows is wrong, or there is meta_info. The message is as detailed as in
                `check_request`.
        """
        method = self.methods[rpc]
        where = f"the answer of {method.role}.{method.name}"
        expected = method.answers(request.meta_info)
        try:
            if foreign := sorted(set(answer.columns) - set(expected)):
                raise InvalidBatch(f"{where} has columns {foreign} besides {sorted(expected)}")
            if missing := sorted(set(expected) - set(answer.columns)):
                raise InvalidBatch(f"{where} lacks columns {missing}; got {sorted(answer.columns)}")
            if answer.meta_info:
                raise InvalidBatch(f"{where} has meta_info {sorted(answer.meta_info)}; none is declared")
            asked = len(answer) if "row" in expected else len(request)
            if len(answer) != asked or not asked:
                raise InvalidBatch(f"{where}: {asked or 'some'} rows were asked for, {len(answer)} came")
            sampled = answer.tensors.get("response_mask", request.tensors.get("response_mask"))
            self._check(where, method, answer, sampled)
        except InvalidBatch as error:
            raise RoleFailed(str(error)) from error

    def _check(self, where: str, method: Method, batch: DataProto, sampled: Tensor | None) -> None:
        """Check every column against its declaration."""
        sizes = {**method.sizes, "B": len(batch)}
        if self.vocabulary is not None:
            sizes["V"] = self.vocabulary
        for name in batch.columns:
            _check_kind(f"{where}: column {name!r}", COLUMNS[name], batch[name], sizes)
        for name, tensor in batch.tensors.items():
            _check_values(f"{where}: column {name!r}", COLUMNS[name], tensor, sizes, sampled)


def _check_kind(what: str, column: Column, value: Tensor | NDArray[Any], sizes: Mapping[str, int]) -> None:
    """Check dtype and shape of a tensor, or the cells of another column."""
    if isinstance(value, Tensor):
        _check_tensor(what, column, value.dtype, tuple(value.shape), sizes)
    elif column.dtype is None:
        kind = column.cells.__name__
        for row, cell in enumerate(value):
            if type(cell) is not column.cells:
                got = f"{reprlib.repr(cell)} ({type(cell).__name__})"
                raise InvalidBatch(f"{what}, row {row}, is {got}; a {kind} expected")
            if column.entries:
                _check_entries(f"{what}, row {row},", column.entries, cell)
    else:
        raise InvalidBatch(f"{what} is not a tensor (it has {len(value)} cells); {_expected(column, sizes)}")


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


def _check_entries(what: str, kinds: Mapping[str, type], cell: Any) -> None:
    """Check the values of a cell's dict. Numbers must fit in float32, so that no mean of them overflows."""
    for key, value in cell.items():
        if kinds.get(key, kinds[OTHER]) is str:
            fits = type(value) is str
            expected = "a str"
        else:
            fits = type(value) in (int, float) and abs(value) <= FLOAT32_MAX  # NaN is not
            expected = "a number in float32's range"
        if not fits:
            got = f"{reprlib.repr(value)} ({type(value).__name__})"
            raise InvalidBatch(f"{what} has {reprlib.repr(key)}: {got}; {expected} expected")


def _check_values(
    what: str, column: Column, tensor: Tensor, sizes: Mapping[str, int], sampled: Tensor | None
) -> None:
    """Check that integers are in their range, and that floats are finite where tokens were sampled.

    A column that is `zero_elsewhere` must be 0 in all other cells.
    """
    if column.values is None and not tensor.is_floating_point():
        return
    cells = tensor.numpy()
    least = cells.min()
    most = cells.max()
    if column.values is not None:
        low, limit = column.values
        end = limit if isinstance(limit, int) else sizes.get(limit, 1 << 63)
        if least < low or most >= end:
            at = np.argwhere((cells < low) | (cells >= end))[0]
            below = {"V": f"the vocabulary of {end}", "S": f"S = {end}"}.get(str(limit), str(end))
            raise InvalidBatch(f"{_at(what, at)} is {cells[tuple(at)]}; {low} or more, below {below}, expected")
    elif not (np.isfinite(least) and np.isfinite(most)):  # both are NaN if any cell is
        counts = sampled.numpy() if column.axes == "BT" and sampled is not None else True
        wrong = ~np.isfinite(cells) & counts
        if wrong.any():
            at = np.argwhere(wrong)[0]
            raise InvalidBatch(f"{_at(what, at)} is {cells[tuple(at)]}; a finite number expected")
    if column.zero_elsewhere and sampled is not None and (wrong := ~sampled.numpy() & (cells != 0)).any():
        at = np.argwhere(wrong)[0]
        raise InvalidBatch(f"{_at(what, at)} is {cells[tuple(at)]}; 0 expected where response_mask is False")


def _at(what: str, index: NDArray[Any]) -> str:
    row, *inner = index.tolist()
    return f"{what}, row {row}, position {', '.join(map(str, inner))}," if inner else f"{what}, row {row},"


def _one_of(where: str, key: str, known: tuple[str, ...], meta: Mapping[str, Any]) -> str:
    value = meta.get(key)
    if not isinstance(value, str) or value not in known:
        got = reprlib.repr(value)
        raise InvalidBatch(f"{where}: meta_info[{key!r}] is {got}; one of {list(known)} expected")
    return value
