"""DataProto: one batch of named tensors that share axis 0, non-tensor columns of the same length, and meta.

The operations have the names and semantics of verl's DataProto, with one exception: only `pop`, `reorder` and
assignment to a column change a batch. `union` and `rename` return a new one. Tensors are shared instead of
copied if torch can share them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.dataproto.column import (
    Column,
    as_column,
    check_alike,
    check_tensor,
    joined_column,
    joined_meta,
    merged,
    positions,
)
from rolemesh.dataproto.equality import same_array, same_tensor, same_value
from rolemesh.dataproto.transfer import on_device
from rolemesh.errors import InvalidBatch

if TYPE_CHECKING:
    from tensordict import TensorDict

Index = int | slice | Sequence[int] | Sequence[bool] | Tensor | NDArray[Any]


@dataclass(eq=False)
class DataProto:
    """A batch of B rows.

    Args:
        tensors: name to strided tensor [B, ...].
        non_tensors: name to numpy array: [B, ...] of numbers or bools, or [B] of dtype object for strings,
            lists and dicts. Other sequences of B cells are converted to such arrays.
        meta_info: JSON-like data about the batch as a whole.
        num_rows: B of a batch without columns; None: the columns tell it, or it is unknown.

    Raises:
        InvalidBatch: a tensor is nested or sparse, the columns differ in length, a name is both a tensor and
            a non-tensor column, or num_rows is not a non-negative int.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    non_tensors: dict[str, Column] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    num_rows: int | None = None

    def __post_init__(self) -> None:
        self.tensors = dict(self.tensors)  # `pop` changes this batch, not the caller's dict
        for name, tensor in self.tensors.items():
            check_tensor(name, tensor)
        self.non_tensors = {name: as_column(values) for name, values in self.non_tensors.items()}
        lengths = {name: len(tensor) for name, tensor in self.tensors.items()}
        lengths |= {name: len(column) for name, column in self.non_tensors.items()}
        if self.num_rows is not None:
            if type(self.num_rows) is not int or self.num_rows < 0:
                raise InvalidBatch(f"num_rows is {self.num_rows!r:.80}; expected an int of 0 or more")
            lengths["num_rows"] = self.num_rows
        if len(set(lengths.values())) > 1:
            raise InvalidBatch(f"columns of one batch need the same number of rows; got {lengths}")
        self.num_rows = next(iter(lengths.values()), None)
        if both := self.tensors.keys() & self.non_tensors.keys():
            raise InvalidBatch(f"{sorted(both)} are both tensors and non-tensor columns")

    # ------------------------------------------------------------------ making

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> DataProto:
        """Build a batch of these columns; non-tensor columns may be lists."""
        return cls(dict(tensors or {}), dict(non_tensors or {}), dict(meta_info or {}))

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Build a batch of mixed columns: torch tensors become tensors, all others non-tensor columns."""
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in data.items() if not isinstance(value, Tensor)}
        return cls.from_dict(tensors, others, meta_info)

    # ----------------------------------------------------------------- reading

    def __len__(self) -> int:
        return self.num_rows or 0

    @property
    def columns(self) -> list[str]:
        """Names of all columns, tensors first."""
        return [*self.tensors, *self.non_tensors]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors or name in self.non_tensors

    def __getitem__(self, key: str | Index) -> Any:
        """Return a column for a name, else a batch of rows for an int, slice, list, mask or index array."""
        if isinstance(key, str):
            if key in self.tensors:
                return self.tensors[key]
            if key in self.non_tensors:
                return self.non_tensors[key]
            raise InvalidBatch(f"no column {key!r}; the batch has {sorted(self.columns)}")
        return self._rows(key)

    def __setitem__(self, name: str, value: Any) -> None:
        """Add a column, or replace the one of that name."""
        tensors = {other: tensor for other, tensor in self.tensors.items() if other != name}
        columns = {other: column for other, column in self.non_tensors.items() if other != name}
        if isinstance(value, Tensor):
            tensors = {**self.tensors, name: value}
        else:
            columns = {**self.non_tensors, name: value}
        num_rows = None if self.columns == [name] else self.num_rows
        checked = DataProto(tensors, columns, num_rows=num_rows)
        self.tensors = checked.tensors
        self.non_tensors = checked.non_tensors
        self.num_rows = checked.num_rows

    def _rows(self, index: Index) -> DataProto:
        if isinstance(index, int | np.integer):
            if not -len(self) <= index < len(self):
                raise IndexError(f"row {index} of a batch of {len(self)}")
            at = int(index) % len(self)
            index = slice(at, at + 1)
        if isinstance(index, slice):
            count = len(range(len(self))[index])
            return self._map(lambda tensor: tensor[index], lambda column: column[index], count)
        return self.select_idxs(index)

    def _map(self, tensor_fn: Any, column_fn: Any, num_rows: int) -> DataProto:
        return DataProto(
            {name: tensor_fn(tensor) for name, tensor in self.tensors.items()},
            {name: column_fn(column) for name, column in self.non_tensors.items()},
            dict(self.meta_info),
            None if self.num_rows is None else num_rows,
        )

    # --------------------------------------------------------------- selecting

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """Return a batch of the named columns and meta keys; None selects all of a kind.

        Raises:
            InvalidBatch: a name does not exist.
        """
        picked = DataProto(
            _pick("tensor", self.tensors, batch_keys),
            _pick("non-tensor column", self.non_tensors, non_tensor_batch_keys),
            _pick("meta_info key", self.meta_info, meta_info_keys),
            self.num_rows,
        )
        if not deepcopy:
            return picked
        copied = picked._map(lambda tensor: tensor.clone(), copy.deepcopy, len(self))
        copied.meta_info = copy.deepcopy(picked.meta_info)
        return copied

    def select_columns(self, names: Sequence[str]) -> DataProto:
        """Select columns of either kind by name, with all meta. Raises InvalidBatch if one is missing."""
        if missing := [name for name in names if name not in self]:
            raise InvalidBatch(f"needs columns {missing}; the batch has {sorted(self.columns)}")
        return DataProto(
            {name: self.tensors[name] for name in names if name in self.tensors},
            {name: self.non_tensors[name] for name in names if name in self.non_tensors},
            dict(self.meta_info),
            self.num_rows,
        )

    def select_idxs(self, idxs: Index) -> DataProto:
        """Select rows by a list or array of positions, or by a mask of B bools."""
        at = positions(idxs, len(self))
        index = torch.from_numpy(at)
        return self._map(
            lambda rows: rows.index_select(0, index.to(rows.device)), lambda column: column[at], len(at)
        )

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> DataProto:
        """Remove the named columns and meta keys from this batch, and return them as another."""
        taken = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        for name in batch_keys:
            del self.tensors[name]
        for name in non_tensor_batch_keys:
            del self.non_tensors[name]
        for name in meta_info_keys:
            del self.meta_info[name]
        return taken

    def rename(
        self,
        old_keys: str | Sequence[str] | None = None,
        new_keys: str | Sequence[str] | None = None,
        **names: str,
    ) -> DataProto:
        """Rename columns: `rename("a", "b")`, `rename(["a"], ["b"])` or `rename(a="b")`."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        if len(old) != len(new):
            raise InvalidBatch(f"rename of {len(old)} columns to {len(new)} names")
        names = {**dict(zip(old, new, strict=True)), **names}
        if missing := [name for name in names if name not in self]:
            raise InvalidBatch(f"cannot rename {missing}; the batch has {sorted(self.columns)}")
        renamed = [names.get(name, name) for name in self.columns]
        if len(set(renamed)) < len(renamed):
            raise InvalidBatch(f"rename {names} would give two columns one name: {sorted(renamed)}")
        return DataProto(
            {names.get(name, name): tensor for name, tensor in self.tensors.items()},
            {names.get(name, name): column for name, column in self.non_tensors.items()},
            dict(self.meta_info),
            self.num_rows,
        )

    # ----------------------------------------------------------------- joining

    def union(self, *others: DataProto) -> DataProto:
        """Join the columns of all batches, row by row. Equal duplicates merge.

        Raises:
            InvalidBatch: two batches differ in length, or in a column or meta value of one name.
        """
        tensors = dict(self.tensors)
        columns = dict(self.non_tensors)
        meta = dict(self.meta_info)
        num_rows = self.num_rows
        for other in others:
            num_rows = other.num_rows if num_rows is None else num_rows
            if other.num_rows not in (None, num_rows):
                raise InvalidBatch(
                    f"union: columns of one batch need the same number of rows; got {num_rows} and {len(other)}"
                )
            tensors = merged(tensors, other.tensors, same_tensor)
            columns = merged(columns, other.non_tensors, same_array)
            for key, value in other.meta_info.items():
                if key in meta and not same_value(meta[key], value):
                    raise InvalidBatch(f"union: meta_info[{key!r}] is {meta[key]!r} here, {value!r} there")
                meta[key] = value
        return DataProto(tensors, columns, meta, num_rows)

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Concatenate the rows of all batches, and join their meta_info.

        meta_info["metrics"], a dict or a list of dicts in each batch, becomes one dict from each name to the
        list of its values, in the order of the batches. Batches that share another key must agree on its value.

        Raises:
            InvalidBatch: no batches, or two that differ in columns, element types or trailing shapes, or
                disagree on a meta value.
        """
        if not data:
            raise InvalidBatch("concat needs at least one batch; got none")
        first = data[0]
        for other in data[1:]:
            check_alike(first.tensors, other.tensors, set(first.columns), set(other.columns))
        return DataProto(
            {name: torch.cat([part.tensors[name] for part in data]) for name in first.tensors},
            {
                name: joined_column(name, [part.non_tensors[name] for part in data])
                for name in first.non_tensors
            },
            joined_meta([part.meta_info for part in data]),
            None if all(part.num_rows is None for part in data) else sum(map(len, data)),
        )

    # --------------------------------------------------------------- splitting

    def chunk(self, chunks: int) -> list[DataProto]:
        """Cut the rows into exactly `chunks` parts of equal length.

        Raises:
            InvalidBatch: the rows do not divide evenly; `pad_dataproto_to_divisor` fixes that.
        """
        if chunks < 1 or len(self) % chunks:
            raise InvalidBatch(f"{len(self)} rows do not divide into {chunks} equal chunks")
        return self.split(max(1, len(self) // chunks)) if len(self) else [self] * chunks

    def split(self, split_size: int) -> list[DataProto]:
        """Cut the rows into parts of `split_size`; the last may be shorter."""
        if split_size < 1:
            raise InvalidBatch(f"split needs parts of 1 row or more; got split_size {split_size}")
        return [self._rows(slice(start, start + split_size)) for start in range(0, len(self), split_size)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, bool] | None = None,
    ) -> Iterator[DataProto]:
        """Yield mini-batches, for `epochs` passes over the rows.

        Args:
            seed: seed of the shuffled orders; None: use the process's global generator.
            dataloader_kwargs: {"shuffle": True} shuffles the rows anew for every pass; default: no shuffle.

        Raises:
            InvalidBatch: the rows do not divide into mini-batches, or a kwarg other than shuffle.
        """
        if len(self) % mini_batch_size:
            raise InvalidBatch(f"{len(self)} rows do not divide into mini-batches of {mini_batch_size}")
        options = dict(dataloader_kwargs or {})
        shuffle = options.pop("shuffle", False)
        if options:
            raise InvalidBatch(f"dataloader_kwargs can contain only shuffle; got {sorted(options)}")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            rows = self.select_idxs(torch.randperm(len(self), generator=generator)) if shuffle else self
            yield from rows.split(mini_batch_size)

    # -------------------------------------------------------------- rearranging

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeat every row `repeat_times` times: a a b b if interleaved, else a b a b."""
        index = torch.arange(len(self))
        return self.select_idxs(
            index.repeat_interleave(repeat_times) if interleave else index.repeat(repeat_times)
        )

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor) -> DataProto:
        """Repeat row b `repeat_times[b]` times, interleaved."""
        times = torch.as_tensor(repeat_times)
        if times.shape != (len(self),):
            raise InvalidBatch(f"{len(times)} repeat counts for {len(self)} rows; expected one for each row")
        return self.select_idxs(torch.arange(len(self)).repeat_interleave(times))

    def reorder(self, indices: Index) -> None:
        """Reorder the rows in place: new row i is old row indices[i]."""
        order = torch.as_tensor(indices)
        if sorted(order.tolist()) != list(range(len(self))):
            raise InvalidBatch(f"reorder needs a permutation of {len(self)} rows")
        other = self.select_idxs(order)
        self.tensors = other.tensors
        self.non_tensors = other.non_tensors

    def to(self, device: torch.device | str) -> DataProto:
        """Return the batch with its tensors on `device`."""
        moved = on_device(self.tensors, torch.device(device))
        return DataProto(moved, self.non_tensors, dict(self.meta_info), self.num_rows)

    # -------------------------------------------------------------- tensordict

    def to_tensordict(self) -> TensorDict:
        """Convert to a TensorDict: tensors, a NonTensorStack for each other column, NonTensorData for meta.

        Raises:
            InvalidBatch: a name is both a column and a meta_info key.
            Unsupported: tensordict is not installed (`pip install 'rolemesh[tensordict]'`).
        """
        from rolemesh.dataproto.tensordict import to_tensordict

        return to_tensordict(self.tensors, self.non_tensors, self.meta_info, len(self))

    @staticmethod
    def from_tensordict(data: TensorDict, meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """Convert a TensorDict with one batch axis; `meta_info` is added to its own.

        Raises:
            InvalidBatch: another number of batch axes, or a nested TensorDict.
            Unsupported: tensordict is not installed (`pip install 'rolemesh[tensordict]'`).
        """
        from rolemesh.dataproto.tensordict import from_tensordict

        tensors, columns, meta = from_tensordict(data)
        return DataProto(tensors, columns, {**meta, **(meta_info or {})}, num_rows=data.batch_size[0])

    def print_size(self, prefix: str = "") -> None:
        """Print the memory that the columns take. Of object cells, only the references count."""
        tensors = sum(tensor.nbytes for tensor in self.tensors.values()) / 2**30
        columns = sum(column.nbytes for column in self.non_tensors.values()) / 2**30
        print(f"{prefix}{prefix and ', '}tensors: {tensors:.6f} GiB, non-tensor columns: {columns:.6f} GiB")

    def __repr__(self) -> str:
        tensors = ", ".join(f"{n}: {list(t.shape)} {t.dtype}" for n, t in self.tensors.items())
        return f"DataProto({len(self)} rows; {tensors}; {', '.join(self.non_tensors)}; meta {self.meta_info})"


def _pick(kind: str, source: Mapping[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    if names is None:
        return dict(source)
    if missing := [name for name in names if name not in source]:
        raise InvalidBatch(f"no {kind} {missing}; the batch has {sorted(source)}")
    return {name: source[name] for name in names}
