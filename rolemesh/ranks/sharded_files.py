"""Safetensors files that the ranks of a role write and read together, each rank its own rows.

Such a file is a header and one region of bytes. A rank's rows of a tensor are a contiguous range of it, and
every rank writes its own. The file does not depend on the number of ranks: any other number of ranks can read
it, and so can any reader of safetensors.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rolemesh.errors import ModelNotFound, unreadable
from rolemesh.home import Home
from rolemesh.models.directory import weight_files
from rolemesh.ranks.collective_errors import broadcast_text, raise_on_all_ranks
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharding import is_first_copy, is_in_rows, local, memory_of, rows_of, whole
from rolemesh.weights.staging import Staging, Writers

# safetensors' names of types, in the order in which it lays out tensors.
TYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.uint32: "U32",
    torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
FLOATS = {"F64", "F32", "BF16", "F16"}
HEADER_ALIGNMENT = 8


# ---------------------------------------------------------------------------------------- writing


@contextmanager
def writing(home: Home, directory: Path, ranks: Ranks) -> Iterator[Path]:
    """Home.writing for all ranks: they fill one new directory, which rank 0 moves into place at the end.

    Every rank calls it. If the block fails on one rank, it fails on all, and nothing is moved. In the block a
    rank may fail only within `raise_on_all_ranks`.
    """
    with ExitStack() as stack:
        with raise_on_all_ranks(ranks):
            if ranks.rank == 0:
                into = stack.enter_context(home.writing(directory))
        name = broadcast_text(ranks, Path(os.path.realpath(into)).name if ranks.rank == 0 else "")
        with raise_on_all_ranks(ranks):
            if ranks.rank:
                into = stack.enter_context(home.joining(directory, name))
        yield into
        with raise_on_all_ranks(ranks):
            stack.close()


@dataclass(frozen=True)
class HostRows:
    """A copy of what one rank writes of a tensor.

    Args:
        dtype, shape: of the whole tensor.
        start: the first row that the rank holds.
        rows: contiguous, in host memory; None if another rank writes them.
    """

    dtype: torch.dtype
    shape: torch.Size
    start: int
    rows: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, ranks: Ranks, copies: HostCopies) -> HostRows:
        """Copy a tensor. Every rank calls it, because one whose parts are not rows is gathered."""
        source = tensor if is_in_rows(tensor) else whole(tensor)
        rows = copies.of(local(source).detach()) if is_first_copy(source, ranks) else None
        return cls(tensor.dtype, tensor.shape, rows_of(source).start, rows)


class HostCopies:
    """Copies tensors to host memory. Tensors on a GPU pass through pinned buffers, while the device runs on."""

    def __init__(self) -> None:
        self._writers: Writers | None = None
        self._staging: Staging | None = None
        self._starts: list[int] = []  # of each staged copy, as if they lay end to end
        self._staged: list[Tensor] = []  # their bytes
        self._end = 0

    def of(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy. The copy of a tensor on a GPU is complete after `finish`."""
        if tensor.device.type != "cuda" or not tensor.numel():
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._starts.append(self._end)
        self._staged.append(copy.view(-1).view(torch.uint8))
        if self._staging is None:
            self._writers = Writers(self._write)
            self._staging = Staging(self._writers, tensor.device)
        self._staging.put(self._end, tensor.contiguous().view(-1).view(torch.uint8))
        self._end += tensor.nbytes
        return copy

    def finish(self) -> None:
        """Wait for copies that are still on their way from the device."""
        if self._staging is not None and self._writers is not None:
            self._staging.finish()
            self._writers.close()

    def _write(self, at: int, data: Tensor) -> None:
        """Fill a part of one copy; Staging joins no two."""
        number = bisect_right(self._starts, at) - 1
        start = at - self._starts[number]
        self._staged[number][start : start + len(data)] = data


def copied(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, HostRows]:
    """Copy the rows that this rank writes to host memory. Every rank calls it.

    Args:
        tensors: whole or sharded, on any device; the same names and shapes on every rank.
        ranks: the role's.
    """
    copies = HostCopies()
    rows = {name: HostRows.of(tensor, ranks, copies) for name, tensor in tensors.items()}
    copies.finish()
    return rows


def write_rows(
    file: Path, tensors: Mapping[str, HostRows], ranks: Ranks, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file as safetensors.torch.save_file does, and wait until it is on disk. Every rank calls it.

    Args:
        file: to write, on a file system that all ranks share.
        tensors: by name; the same names on every rank.
        ranks: the role's.
        metadata: of the file.
    """
    header, places = _lay_out(tensors, metadata)
    with raise_on_all_ranks(ranks):
        if ranks.rank == 0:
            with open(file, "wb") as made:
                made.write(header)
    with raise_on_all_ranks(ranks), ExitStack() as stack:
        descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
        for name, tensor in tensors.items():
            if tensor.rows is not None:
                row_bytes = tensor.dtype.itemsize * math.prod(tensor.shape[1:])
                at = len(header) + places[name] + tensor.start * row_bytes
                _write(descriptor, memory_of(tensor.rows), at)
        os.fsync(descriptor)


def _lay_out(
    tensors: Mapping[str, HostRows], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and where each tensor begins after it."""
    order = list(TYPES)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name)):
        tensor = tensors[name]
        places[name] = end
        end = end + tensor.shape.numel() * tensor.dtype.itemsize
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [places[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, places


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        offset = offset + written
        data = data[written:]


# ---------------------------------------------------------------------------------------- reading


class TensorFiles:
    """The tensors of safetensors files, by name. Only headers are read until rows are requested.

    Raises:
        ModelNotFound: a file is absent or damaged.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._of: dict[str, Any] = {}
        self._file: dict[str, Path] = {}
        for file in files:
            with reading(file):
                opened = safe_open(file, framework="pt")
                names: list[str] = list(opened.keys())  # type: ignore[no-untyped-call]
                self._of |= dict.fromkeys(names, opened)
                self._file |= dict.fromkeys(names, file)

    @classmethod
    def of_model(cls, directory: Path) -> TensorFiles:
        """Return the weights of a Hugging Face model directory: in one file, or in those of its index."""
        return cls(weight_files(directory))

    @property
    def names(self) -> set[str]:
        return set(self._of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._of[name].get_slice(name).get_shape())

    def is_float(self, name: str) -> bool:
        """Return whether a tensor has a plain float type, from which it can be converted to others."""
        return self._of[name].get_slice(name).get_dtype() in FLOATS

    def is_nonzero(self, name: str) -> bool:
        """Return whether a tensor has a number other than 0. Reads all of it."""
        with reading(self._file[name]):
            return bool(self._of[name].get_tensor(name).any())

    def are_equal(self, first: str, second: str, part: int, num_parts: int) -> bool:
        """Compare a part of the rows of two tensors."""
        if self.shape(first) != self.shape(second):
            return False
        per_part = -(-self.shape(first)[0] // num_parts)
        rows = slice(part * per_part, min((part + 1) * per_part, self.shape(first)[0]))
        one, other = (self._of[name].get_slice(name) for name in (first, second))
        return rows.start >= rows.stop or torch.equal(one[rows], other[rows])

    def rows(self, name: str, like: Tensor) -> Tensor:
        """Read this rank's rows of a tensor, converted to the type of `like`, on the CPU.

        Args:
            name: of the tensor.
            like: a tensor of the same whole shape, whose rows of this rank are read.
        """
        with reading(self._file[name]):
            if not like.dim():
                return self._of[name].get_tensor(name).to(like.dtype)  # type: ignore[no-any-return]
            rows = rows_of(like)
            if rows.start == rows.stop:
                return torch.empty(0, *like.shape[1:], dtype=like.dtype)
            return self._of[name].get_slice(name)[rows].to(like.dtype)  # type: ignore[no-any-return]


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn errors from reading a weights file into ModelNotFound, except I/O errors, which stay OSError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        failure = _opening(file) or error
        raise unreadable(ModelNotFound, failure, f"{file} cannot be read: {failure}") from error


def _opening(file: Path) -> OSError | None:
    """Return why a file cannot be opened: safetensors always says that there is none."""
    try:
        file.open("rb").close()
    except OSError as error:
        return error
    return None
