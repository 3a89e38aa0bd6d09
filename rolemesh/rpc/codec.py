"""A batch as a header and a region of bytes, and back. docs/wire.md describes the format.

Nothing in a header is believed: `decode` raises InvalidBatch unless every offset, length and count fits
what has arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from google.protobuf.message import DecodeError, EncodeError
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.rpc import layouts
from rolemesh.rpc.allocator import ALIGNMENT, MAX_REGION_BYTES, Region
from rolemesh.rpc.columns import from_arrow, from_json, to_arrow, to_json
from rolemesh.rpc.dtypes import FROM_WIRE, INTEGERS, TO_WIRE, Array
from rolemesh.rpc.frame import join_frame, split_frame
from rolemesh.rpc.layouts import Packed, Spans
from rolemesh.v1 import data_pb2, frame_pb2

MAX_HEADER_BYTES = 32 << 20  # it travels in one frame; half of the largest message (channels.CHANNEL_OPTIONS)

# A batch without its padding may be far smaller than with it, and a few bytes may claim a column of any size.
# Sender and receiver keep to this: unpacked columns take no more than FREE_EXPANSION bytes plus
# MAX_EXPANSION times the region. A sender that would exceed it sends the padding.
FREE_EXPANSION = 64 << 20
MAX_EXPANSION = 1024

_WITH_VALUES = (data_pb2.LAYOUT_DENSE, data_pb2.LAYOUT_RAGGED)
_WITH_SPANS = (data_pb2.LAYOUT_RAGGED, data_pb2.LAYOUT_MASK, data_pb2.LAYOUT_POSITIONS)
_WITH_FILL = (data_pb2.LAYOUT_RAGGED, data_pb2.LAYOUT_CONSTANT)


@dataclass(frozen=True)
class Encoded:
    """A batch ready to be sent.

    Args:
        header: a FrameHeader message.
        buffers: the region in order, alignment included; joined they have region_bytes bytes. They share
            the batch's memory where they can.
        region_bytes: size of the region.
    """

    header: bytes
    buffers: list[memoryview]
    region_bytes: int


def dump(batch: DataProto) -> bytes:
    """The batch as one blob: a single Frame message. Raises InvalidBatch like `encode`."""
    encoded = encode(batch)
    return join_frame(encoded.header, encoded.buffers, encoded.region_bytes)


def load(data: bytes | memoryview) -> DataProto:
    """The batch that `dump` wrote; it shares no memory with `data`.

    Raises:
        InvalidBatch: `data` is truncated, too long or anything else than a batch.
    """
    header, payload = split_frame(data)
    if header is None:
        raise InvalidBatch("not a batch: no header")
    region = Region(region_bytes_of(header))
    region.write(payload)
    return decode(header, region.whole())


# --------------------------------------------------------------------------------------- sending


def encode(batch: DataProto) -> Encoded:
    """The batch as a header and buffers.

    Raises:
        InvalidBatch: a column, cell or meta value has no place on the wire. Names which, and its type.
    """
    batch = DataProto(
        batch.tensors, batch.non_tensors, batch.meta_info
    )  # its dicts may have been changed since
    packed = layouts.pack(batch.tensors)
    if _expanded_bytes(packed) > _expansion_limit(_sent_bytes(packed)):
        packed = layouts.pack_plainly(batch.tensors)
    region = _Writer()
    header = frame_pb2.FrameHeader(num_rows=len(batch), meta_json=to_json(_meta(batch), "meta_info"))
    indexes: dict[int, int] = {}
    for column in packed:
        if column.spans is not None and id(column.spans) not in indexes:
            indexes[id(column.spans)] = len(indexes)
            header.spans.append(region.add(column.spans.starts, column.spans.lengths))
    try:
        header.tensors.extend(_spec(column, indexes, region) for column in packed)
    except (UnicodeEncodeError, ValueError, TypeError) as error:
        raise InvalidBatch(f"a column name cannot be sent: {error}") from None
    if batch.non_tensors:
        header.columns.CopyFrom(region.add(to_arrow(batch.non_tensors)))
    header.region_bytes = region.num_bytes
    try:
        message = header.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise InvalidBatch(f"the batch's header cannot be sent: {error}") from None
    if len(message) > MAX_HEADER_BYTES:
        raise InvalidBatch(
            f"names and meta_info take {len(message)} bytes, at most {MAX_HEADER_BYTES} travel; "
            "make large meta_info a column"
        )
    return Encoded(message, region.buffers, region.num_bytes)


def _meta(batch: DataProto) -> dict[str, object]:
    if type(batch.meta_info) is not dict:
        raise InvalidBatch(f"meta_info is a {type(batch.meta_info).__qualname__}, not a dict")
    return batch.meta_info


class _Writer:
    """Lays buffers into a region, each on a 64-byte boundary."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.num_bytes = 0

    def add(self, *parts: Array | memoryview) -> frame_pb2.Span:
        """The parts, one directly after the other."""
        if gap := -self.num_bytes % ALIGNMENT:
            self.buffers.append(memoryview(bytes(gap)))
            self.num_bytes += gap
        offset = self.num_bytes
        for part in parts:
            view = part.reshape(-1).view(np.uint8).data if isinstance(part, np.ndarray) else part
            self.buffers.append(view)
            self.num_bytes += view.nbytes
        return frame_pb2.Span(offset=offset, num_bytes=self.num_bytes - offset)


def _spec(column: Packed, indexes: dict[int, int], region: _Writer) -> frame_pb2.TensorSpec:
    spec = frame_pb2.TensorSpec(
        name=column.name,
        dtype=TO_WIRE[column.dtype],
        wire_dtype=TO_WIRE[column.wire_dtype],
        shape=column.shape,
        layout=column.layout,
        fill=column.fill,
    )
    if column.values is not None:
        spec.data.CopyFrom(region.add(column.values))
    if column.spans is not None:
        spec.span_index = indexes[id(column.spans)]
    return spec


def _sent_bytes(packed: Sequence[Packed]) -> int:
    return sum(column.values.nbytes for column in packed if column.values is not None)


def _expanded_bytes(packed: Sequence[Packed]) -> int:
    """Bytes of all columns that are not received in place."""
    return sum(
        math.prod(column.shape) * column.dtype.itemsize
        for column in packed
        if column.layout != data_pb2.LAYOUT_DENSE or column.dtype != column.wire_dtype
    )


def _expansion_limit(region_bytes: int) -> int:
    return FREE_EXPANSION + MAX_EXPANSION * region_bytes


# ------------------------------------------------------------------------------------- receiving


def region_bytes_of(header: bytes) -> int:
    """What a header says of the region's size. Raises InvalidBatch where it is no header."""
    return int(_parse(header).region_bytes)


def decode(header: bytes, region: memoryview) -> DataProto:
    """The batch. Dense tensors are writable views of the region; the others have their own memory.

    Args:
        header: a FrameHeader message.
        region: all of its bytes, writable, starting on a 64-byte boundary.

    Raises:
        InvalidBatch: header and region are not what `encode` makes of any batch.
    """
    parsed = _parse(header)
    if parsed.region_bytes != region.nbytes:
        raise InvalidBatch(f"the header says {parsed.region_bytes} bytes, {region.nbytes} arrived")
    if parsed.num_rows and not parsed.tensors and not parsed.columns.num_bytes:
        raise InvalidBatch(f"{parsed.num_rows} rows of no columns")
    reader = _Reader(region)
    spans = [reader.take(f"spans[{i}]", span) for i, span in enumerate(parsed.spans)]
    packed = [_packed(spec, parsed.num_rows, reader, spans) for spec in parsed.tensors]
    columns = reader.take("columns", parsed.columns) if parsed.HasField("columns") else memoryview(b"")
    reader.check_overlap()
    names = [column.name for column in packed]
    if len(set(names)) < len(names):
        raise InvalidBatch(f"two tensors have one name: {names}")
    if (expanded := _expanded_bytes(packed)) > min(_expansion_limit(region.nbytes), MAX_REGION_BYTES):
        raise InvalidBatch(f"{region.nbytes} bytes claim to be {expanded}")
    meta = from_json(parsed.meta_json, "meta_info")
    if not isinstance(meta, dict):
        raise InvalidBatch(f"meta_info is a {type(meta).__qualname__}, not an object")
    tensors = {column.name: _tensor(column) for column in packed}
    return DataProto(tensors, from_arrow(columns, parsed.num_rows), meta)


def _parse(header: bytes) -> frame_pb2.FrameHeader:
    try:
        return frame_pb2.FrameHeader.FromString(header)
    except DecodeError as error:
        raise InvalidBatch(f"not a batch's header: {error}") from None


class _Reader:
    """Takes spans out of a region, each byte at most once."""

    def __init__(self, region: memoryview) -> None:
        self.region = region
        self._taken: list[tuple[int, int, str]] = []

    def take(self, what: str, span: frame_pb2.Span) -> memoryview:
        end = span.offset + span.num_bytes
        if span.offset % ALIGNMENT or end > self.region.nbytes:
            raise InvalidBatch(
                f"{what} lies at {span.offset} to {end} of a region of {self.region.nbytes} bytes"
            )
        if span.num_bytes:
            self._taken.append((span.offset, end, what))
        return self.region[span.offset : end]

    def check_overlap(self) -> None:
        self._taken.sort()
        for (_, end, what), (start, _, other) in zip(self._taken, self._taken[1:], strict=False):
            if start < end:
                raise InvalidBatch(f"{what} and {other} share bytes of the region")


def _packed(spec: frame_pb2.TensorSpec, num_rows: int, reader: _Reader, spans: list[memoryview]) -> Packed:
    what, shape = f"column {spec.name!r}", tuple(spec.shape)
    dtype, wire_dtype = FROM_WIRE.get(spec.dtype), FROM_WIRE.get(spec.wire_dtype)
    if dtype is None or wire_dtype is None:
        raise InvalidBatch(f"{what} has an unknown element type, {spec.dtype} as {spec.wire_dtype}")
    if dtype != wire_dtype and not _widens(wire_dtype, dtype):
        raise InvalidBatch(f"{what}: {dtype} cannot travel as {wire_dtype}")
    if not shape or shape[0] != num_rows or max(shape) >= 2**63:
        raise InvalidBatch(f"{what} of shape {list(shape)} in a batch of {num_rows} rows")
    if spec.layout not in data_pb2.Layout.values() or spec.layout == data_pb2.LAYOUT_UNSPECIFIED:
        raise InvalidBatch(f"{what} has the unknown layout {spec.layout}")
    if len(spec.fill) != (dtype.itemsize if spec.layout in _WITH_FILL else 0):
        raise InvalidBatch(f"{what} is filled with {len(spec.fill)} bytes, an element has {dtype.itemsize}")
    if dtype == torch.bool and spec.fill not in (b"", b"\0", b"\1"):
        raise InvalidBatch(f"{what} is bool and filled with {spec.fill!r}")
    if spec.HasField("data") != (spec.layout in _WITH_VALUES):
        raise InvalidBatch(
            f"{what}: layout {spec.layout} {'has no' if spec.HasField('data') else 'needs'} data"
        )
    packed = Packed(spec.name, dtype, wire_dtype, shape, spec.layout, fill=spec.fill)
    if spec.layout in _WITH_SPANS:
        packed.spans = _spans(what, spec, shape, spans)
    if spec.layout == data_pb2.LAYOUT_POSITIONS and dtype not in INTEGERS:
        raise InvalidBatch(f"{what}: positions of {dtype}")
    if spec.layout in _WITH_VALUES:
        data = reader.take(what, spec.data)
        count = packed.spans.num_held if packed.spans is not None else math.prod(shape)
        if data.nbytes != count * wire_dtype.itemsize:
            raise InvalidBatch(f"{what}: {count} elements of {wire_dtype} in {data.nbytes} bytes")
        packed.values = np.frombuffer(data, f"<u{wire_dtype.itemsize}")
    return packed


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    return narrow in layouts.NARROWER and wide in INTEGERS and narrow.itemsize < wide.itemsize


def _spans(what: str, spec: frame_pb2.TensorSpec, shape: tuple[int, ...], spans: list[memoryview]) -> Spans:
    if len(shape) < 2 or spec.span_index >= len(spans):
        raise InvalidBatch(f"{what} of shape {list(shape)} by spans {spec.span_index} of {len(spans)}")
    rows, width = math.prod(shape[:-1]), shape[-1]
    both = spans[spec.span_index]
    if both.nbytes != rows * layouts.SPAN_ROW_BYTES:
        raise InvalidBatch(f"{what}: spans of {rows} rows in {both.nbytes} bytes")
    starts, lengths = np.frombuffer(both, "<i4").reshape(2, rows)
    ends = starts.astype(np.int64) + lengths
    if rows and (starts.min() < 0 or lengths.min() < 0 or ends.max() > width):
        raise InvalidBatch(f"{what}: spans leave the row of {width} elements")
    return Spans(starts, lengths, width)


def _tensor(column: Packed) -> Tensor:
    if math.prod(column.shape):
        return layouts.unpack(column)
    try:
        return torch.empty(column.shape, dtype=column.dtype)
    except RuntimeError as error:  # [0, 2**62, 2**62]: no elements, but strides beyond int64
        raise InvalidBatch(f"column {column.name!r} of shape {list(column.shape)}: {error}") from None
