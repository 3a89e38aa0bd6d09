"""Packs tensors without their redundant parts: padding, masks, positions, constants, unused integer width.

The content decides the layout. Comparison is by bits, so -0.0 and NaN payloads survive. The search takes a few
vectorised passes over a column, or only a look at its edges if there is nothing to save.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import torch
from torch import Tensor

from rolemesh.errors import InvalidBatch
from rolemesh.v1 import data_pb2
from rolemesh.wire.dtypes import INTEGERS, Array, bits_of, element_bits, tensor_of

SPAN_ROW_BYTES = 8  # two int32: first held element, number of held elements
WORTH_UNPADDING = 7 / 8  # unpadding must save 1/8 or more: a dense column is received without a copy
NARROWER = (torch.uint8, torch.uint16, torch.int32)  # wire types tried for integers, in this order


class Spans:
    """Which elements of each row of a [R, N] matrix are held: [starts[r], starts[r] + lengths[r]).

    Args:
        starts: [R] int32.
        lengths: [R] int32; a row that holds nothing starts at 0.
        width: N.
    """

    def __init__(self, starts: Array, lengths: Array, width: int) -> None:
        self.starts = starts
        self.lengths = lengths
        self.width = width
        self.num_held = int(lengths.sum(dtype=np.int64))

    @cached_property
    def inside(self) -> Array:
        """[R, N] bool, True on held elements."""
        return _inside(self.starts, self.lengths, self.width)

    @cached_property
    def positions(self) -> Array:
        """[R, N] int32: 0 before the span, 0, 1, 2, … on it, the last count after it."""
        return _positions(self.starts, self.lengths, self.width)

    def same_as(self, other: Spans) -> bool:
        return (
            self.width == other.width
            and np.array_equal(self.starts, other.starts)
            and np.array_equal(self.lengths, other.lengths)
        )

    def covers(self, other: Spans) -> bool:
        """True if these spans hold every element that `other` holds."""
        if (len(self.starts), self.width) != (len(other.starts), other.width):
            return False
        ends = self.starts + self.lengths
        other_ends = other.starts + other.lengths
        within = (self.starts <= other.starts) & (other_ends <= ends)
        return bool((within | (other.lengths == 0)).all())


def _inside(starts: Array, lengths: Array, width: int) -> Array:
    at = np.arange(width, dtype=np.int32)
    inside: Array = (at >= starts[:, None]) & (at < (starts + lengths)[:, None])
    return inside


def _positions(starts: Array, lengths: Array, width: int) -> Array:
    at = np.arange(width, dtype=np.int32) - starts[:, None]
    positions: Array = np.clip(at, 0, np.maximum(lengths - 1, 0)[:, None], out=at)
    return positions


@dataclass
class Packed:
    """One tensor in its packed form.

    Args:
        values: the elements in the region; None if the layout needs none.
        spans: for RAGGED, MASK and POSITIONS.
        fill: the bytes of one element, for RAGGED and CONSTANT.
    """

    name: str
    dtype: torch.dtype
    wire_dtype: torch.dtype
    shape: tuple[int, ...]
    layout: data_pb2.Layout = data_pb2.LAYOUT_DENSE
    values: Array | None = None
    spans: Spans | None = None
    fill: bytes = b""


def pack(tensors: Mapping[str, Tensor]) -> list[Packed]:
    """Pack the tensors into the fewest bytes. Equal spans become one object, which is sent once.

    Raises:
        InvalidBatch: a tensor cannot be sent (complex, sparse, …).
    """
    bits = {name: _by_rows(bits_of(name, tensor)) for name, tensor in tensors.items()}
    known: list[Spans] = []
    masks: dict[str, Spans] = {}
    for name, column in bits.items():
        found = _spans_of_mask(column, element_bits(1, tensors[name].dtype))
        if found is not None:
            masks[name] = _shared(found, known)
    return [_pack(name, tensors[name], column, masks.get(name), known) for name, column in bits.items()]


def pack_plainly(name: str, tensor: Tensor) -> Packed:
    """Pack the tensor with every element; integers still use the narrowest type that fits."""
    return _dense(name, tensor, bits_of(name, tensor))


def _pack(name: str, tensor: Tensor, bits: Array, mask: Spans | None, known: list[Spans]) -> Packed:
    dtype = tensor.dtype
    packed = Packed(name, dtype, dtype, tuple(tensor.shape))
    if mask is not None:
        packed.layout = data_pb2.LAYOUT_MASK
        packed.spans = mask
    elif _is_constant(bits):
        packed.layout = data_pb2.LAYOUT_CONSTANT
        packed.fill = bits.flat[0].tobytes()
    elif (spans := _spans_of_positions(dtype, bits, known)) is not None:
        packed.layout = data_pb2.LAYOUT_POSITIONS
        packed.spans = spans
    elif (fill := _padding(bits)) is not None and (spans := _spans_of_ragged(bits, fill, known)) is not None:
        packed.layout = data_pb2.LAYOUT_RAGGED
        packed.spans = spans
        packed.fill = fill.tobytes()
        packed.values, packed.wire_dtype = _narrowed(dtype, bits[spans.inside])
    else:
        return _dense(name, tensor, bits)
    return packed


def _dense(name: str, tensor: Tensor, bits: Array) -> Packed:
    values, wire_dtype = _narrowed(tensor.dtype, bits)
    return Packed(name, tensor.dtype, wire_dtype, tuple(tensor.shape), values=values)


def _by_rows(bits: Array) -> Array:
    """Reshape more than two axes to a matrix: all axes but the last become its rows."""
    return bits.reshape(-1, bits.shape[-1]) if bits.ndim > 2 and bits.size else bits


def _is_matrix(bits: Array) -> bool:
    """True for a [R, N] column whose rows are larger than a span and short enough for int32 offsets."""
    return bits.ndim == 2 and bits.shape[0] > 0 and SPAN_ROW_BYTES < bits.shape[1] * bits.itemsize < 2**31


def _is_constant(bits: Array) -> bool:
    flat = bits.reshape(-1)
    if flat.size < 2 or flat[0] != flat[-1] or flat[0] != flat[flat.size // 2]:
        return False
    return bool((flat == flat[0]).all())


def _spans_of_mask(bits: Array, one: int) -> Spans | None:
    """Find the spans of a column of zeros and ones with at most one run of ones in each row, else None."""
    if not _is_matrix(bits) or not ((bits[0] == 0) | (bits[0] == one)).all():
        return None
    spans = _spans_around(bits != 0)
    lengths = np.count_nonzero(bits == one, axis=1)
    if not spans.num_held or not np.array_equal(lengths, spans.lengths):
        return None
    return spans if np.count_nonzero(bits) == spans.num_held else None


def _spans_of_positions(dtype: torch.dtype, bits: Array, known: list[Spans]) -> Spans | None:
    if dtype not in INTEGERS or not _is_matrix(bits):
        return None
    values = bits.view(INTEGERS[dtype])
    for spans in known:
        if spans.width != bits.shape[1] or not np.array_equal(values[:, -1], np.maximum(spans.lengths - 1, 0)):
            continue
        if np.array_equal(values, spans.positions):
            return spans
    return None


def _padding(bits: Array) -> np.generic | None:
    """Guess the padding: the commonest element that stands twice in a row at a row's start or end."""
    if not _is_matrix(bits) or bits.shape[1] < 2:
        return None
    edges = [bits[bits[:, 0] == bits[:, 1], 0], bits[bits[:, -1] == bits[:, -2], -1]]
    elements, counts = np.unique(np.concatenate(edges), return_counts=True)
    return elements[counts.argmax()] if len(elements) else None


def _spans_of_ragged(bits: Array, fill: np.generic, known: list[Spans]) -> Spans | None:
    """Find spans outside of which the column is `fill`, or None if they save too little.

    They are the column's own, or those of a column packed earlier if reusing them sends fewer bytes.
    """
    own = _spans_around(bits != fill)
    own_cost = own.num_held * bits.itemsize + SPAN_ROW_BYTES * len(bits)
    covering = [spans for spans in known if spans.covers(own)]
    best = min(covering, key=lambda spans: spans.num_held, default=None)
    if best is not None and best.num_held * bits.itemsize <= own_cost:
        return best if best.num_held <= WORTH_UNPADDING * bits.size else None
    return _shared(own, known) if own_cost <= WORTH_UNPADDING * bits.nbytes else None


def _spans_around(held: Array) -> Spans:
    """Spans from each row's first True to its last; `held` is [R, N] bool."""
    width = held.shape[1]
    starts = held.argmax(axis=1)
    ends = width - held[:, ::-1].argmax(axis=1)
    none = ~held[np.arange(len(held)), starts]
    starts[none] = ends[none] = 0
    return Spans(starts.astype("<i4"), (ends - starts).astype("<i4"), width)


def _shared(spans: Spans, known: list[Spans]) -> Spans:
    for other in known:
        if other.same_as(spans):
            return other
    known.append(spans)
    return spans


def _narrowed(dtype: torch.dtype, bits: Array) -> tuple[Array, torch.dtype]:
    """Convert integer elements to the narrowest type of NARROWER that holds them all; else leave them."""
    if dtype not in INTEGERS or not bits.size or dtype.itemsize == 1:
        return bits, dtype
    values = bits.view(INTEGERS[dtype])
    low = int(values.min())
    high = int(values.max())
    for narrow in NARROWER:
        info = np.iinfo(INTEGERS[narrow])
        if narrow.itemsize < dtype.itemsize and info.min <= low and high <= info.max:
            return values.astype(INTEGERS[narrow]), narrow
    return bits, dtype


# ------------------------------------------------------------------------------------- receiving


def unpack(packed: Packed) -> Tensor:
    """Restore the tensor.

    A dense tensor that was not narrowed is a writable view of `values`. Any other takes new memory of its own
    size, plus at most 1 MiB of temporary memory. The caller has checked shape, spans and number of values
    against each other.

    Raises:
        InvalidBatch: a bool is neither 0 nor 1, or positions exceed the element type.
    """
    values = packed.values
    if packed.dtype == torch.bool and values is not None and values.size and values.max() > 1:
        raise InvalidBatch(f"column {packed.name!r} is bool and holds {int(values.max())}")
    if packed.layout == data_pb2.LAYOUT_DENSE:
        assert values is not None
        if packed.wire_dtype != packed.dtype:
            values = values.view(INTEGERS[packed.wire_dtype]).astype(INTEGERS[packed.dtype])
        return tensor_of(values.reshape(packed.shape), packed.dtype)
    return tensor_of(_unpacked(packed, values).reshape(packed.shape), packed.dtype)


def _unpacked(packed: Packed, values: Array | None) -> Array:
    unsigned = np.dtype(f"<u{packed.dtype.itemsize}")
    shape = (math.prod(packed.shape[:-1]), packed.shape[-1])
    if packed.layout == data_pb2.LAYOUT_CONSTANT:
        return np.full(shape, np.frombuffer(packed.fill, unsigned)[0])
    spans = packed.spans
    assert spans is not None
    if packed.layout == data_pb2.LAYOUT_RAGGED:
        assert values is not None
        column = np.full(shape, np.frombuffer(packed.fill, unsigned)[0])
        # Widen the values block by block while placing them: all at once would take twice the memory.
        signed = packed.dtype if packed.wire_dtype != packed.dtype else None
        _put(_as_numbers(column, signed), spans, _as_numbers(values, packed.wire_dtype if signed else None))
        return column
    column = np.zeros(shape, unsigned)
    if packed.layout == data_pb2.LAYOUT_MASK:
        _put(column, spans, np.array(element_bits(1, packed.dtype), unsigned))
        return column
    if int(spans.lengths.max(initial=0)) - 1 > np.iinfo(INTEGERS[packed.dtype]).max:
        raise InvalidBatch(f"column {packed.name!r}: {packed.dtype} cannot count to {spans.lengths.max()}")
    _count(column.view(INTEGERS[packed.dtype]), spans)
    return column


def _as_numbers(bits: Array, dtype: torch.dtype | None) -> Array:
    return bits if dtype is None else bits.view(INTEGERS[dtype])


# Rows of WIDE elements or more are written one by one, by slices. Narrower rows are written about BLOCK
# elements at a time, so that temporary arrays have the size of a block instead of a column.
WIDE = 512
BLOCK = 1 << 16


def _put(column: Array, spans: Spans, values: Array) -> None:
    """Write the values into the spans, row by row; a scalar array fills every span."""
    at = 0
    for first, starts, lengths in _blocks(spans):
        if spans.width >= WIDE:
            for row, start, length in zip(count(first), starts.tolist(), lengths.tolist(), strict=False):
                column[row, start : start + length] = values[at : at + length] if values.ndim else values
                at += length
            continue
        num_held = int(lengths.sum(dtype=np.int64))
        inside = _inside(starts, lengths, spans.width)
        column[first : first + len(starts)][inside] = values[at : at + num_held] if values.ndim else values
        at += num_held


def _count(column: Array, spans: Spans) -> None:
    """Turn rows of zeros into positions: 0 before the span, 0, 1, 2, … on it, the last count after it."""
    counts = np.arange(min(BLOCK, int(spans.lengths.max(initial=0)))).astype(column.dtype)
    for first, starts, lengths in _blocks(spans):
        if spans.width < WIDE:
            column[first : first + len(starts)] = _positions(starts, lengths, spans.width)
            continue
        for row, start, length in zip(count(first), starts.tolist(), lengths.tolist(), strict=False):
            for done in range(0, length, BLOCK):
                part = column[row, start + done : start + min(length, done + BLOCK)]
                np.add(counts[: len(part)], done, out=part)
            column[row, start + length :] = max(length - 1, 0)


def _blocks(spans: Spans) -> Iterator[tuple[int, Array, Array]]:
    """Yield first row, starts and lengths of each group of rows that are unpacked together."""
    step = BLOCK // min(spans.width, WIDE)
    for first in range(0, len(spans.starts), step):
        yield first, spans.starts[first : first + step], spans.lengths[first : first + step]
