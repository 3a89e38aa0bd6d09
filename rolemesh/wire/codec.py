"""Encode a batch as a header and a region of bytes, and decode it. docs/wire.md describes the format.

Headers are untrusted: `decode` raises InvalidBatch unless every offset, length and count fits the received
bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from google.protobuf.message import EncodeError
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.v1 import frame_pb2
from rolemesh.wire import layouts
from rolemesh.wire.allocator import ALIGNMENT, GrowingBuffer
from rolemesh.wire.arrow_columns import from_arrow, to_arrow
from rolemesh.wire.dtypes import TO_WIRE, Array
from rolemesh.wire.frame import join_frame, split_frame
from rolemesh.wire.header import (
    WITH_SPANS,
    WITH_VALUES,
    Header,
    check_num_rows,
    expansion_limit,
    read_header,
    unpacked_bytes,
)
from rolemesh.wire.json_text import from_json, to_json
from rolemesh.wire.layouts import Packed, Spans
from rolemesh.wire.limits import MAX_AXES, MAX_COLUMNS, MAX_META_BYTES, MAX_NAME_BYTES


@dataclass(frozen=True)
class Encoded:
    """A batch ready to be sent.

    Args:
        header: a FrameHeader message.
        buffers: the region in order, alignment gaps included; region_bytes bytes in total. They share the
            batch's memory where possible.
        region_bytes: size of the region.
    """

    header: bytes
    buffers: list[memoryview]
    region_bytes: int


def dump(batch: DataProto) -> bytes:
    """Serialize the batch as a single Frame message. Raises InvalidBatch like `encode`."""
    encoded = encode(batch)
    return join_frame(encoded.header, encoded.buffers, encoded.region_bytes)


def load(data: bytes | memoryview) -> DataProto:
    """Read what `dump` wrote. The batch shares no memory with `data`.

    Raises:
        InvalidBatch: `data` is truncated, too long or not a batch.
    """
    data_header, payload = split_frame(data)
    if data_header is None:
        raise InvalidBatch("not a batch: the data has no header")
    header = read_header(data_header)
    region = GrowingBuffer(header.region_bytes)
    region.write(payload)
    return decode(header, region.whole())


# --------------------------------------------------------------------------------------- sending


def save_batch(batch: DataProto, path: str | Path) -> None:
    """Write a batch to a file in the wire format. An existing file stays until the new one is complete."""
    partial = Path(f"{path}.partial")
    partial.write_bytes(dump(batch))
    os.replace(partial, path)


def load_batch(path: str | Path) -> DataProto:
    """Read what `save_batch` wrote.

    Raises:
        InvalidBatch: the file is truncated or not a batch.
    """
    return load(Path(path).read_bytes())


def encode(batch: DataProto) -> Encoded:
    """Encode the batch as a header and buffers.

    Raises:
        InvalidBatch: a column, cell or meta value cannot be sent. The message names it and its type.
    """
    num_rows = None if batch.columns else batch.num_rows
    batch = DataProto(batch.tensors, batch.non_tensors, batch.meta_info, num_rows)  # the dicts may have changed
    _check_names(batch)
    check_num_rows(len(batch), len(batch.columns))
    packed = _pack(batch.tensors)
    region = _RegionWriter()
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
    if len(header.meta_json) > MAX_META_BYTES:
        raise InvalidBatch(
            f"meta_info takes {len(header.meta_json)} bytes of JSON, at most {MAX_META_BYTES} can be sent; "
            "make large meta_info a column"
        )
    return Encoded(message, region.buffers, region.num_bytes)


def _check_names(batch: DataProto) -> None:
    for what, columns in (("tensors", batch.tensors), ("non-tensor columns", batch.non_tensors)):
        if len(columns) > MAX_COLUMNS:
            raise InvalidBatch(f"a batch of {len(columns)} {what}; at most {MAX_COLUMNS} can be sent")
    for name in batch.columns:
        if (num_bytes := len(name.encode(errors="surrogatepass"))) > MAX_NAME_BYTES:
            raise InvalidBatch(
                f"a column name has {num_bytes} bytes, at most {MAX_NAME_BYTES} can be sent: {name[:40]!r}…"
            )
    for name, tensor in batch.tensors.items():
        if tensor.dim() > MAX_AXES:
            raise InvalidBatch(f"column {name!r} has {tensor.dim()} axes, at most {MAX_AXES} can be sent")


def _meta(batch: DataProto) -> dict[str, object]:
    if type(batch.meta_info) is not dict:
        raise InvalidBatch(f"meta_info is a {type(batch.meta_info).__qualname__}, not a dict")
    return batch.meta_info


class _RegionWriter:
    """Lays buffers into a region, each on a 64-byte boundary."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self.num_bytes = 0

    def add(self, *parts: Array | memoryview) -> frame_pb2.Span:
        """Append the parts as one span, without gaps between them."""
        if gap := -self.num_bytes % ALIGNMENT:
            self.buffers.append(memoryview(bytes(gap)))
            self.num_bytes += gap
        offset = self.num_bytes
        for part in parts:
            view = part.reshape(-1).view(np.uint8).data if isinstance(part, np.ndarray) else part
            self.buffers.append(view)
            self.num_bytes += view.nbytes
        return frame_pb2.Span(offset=offset, num_bytes=self.num_bytes - offset)


def _spec(column: Packed, indexes: dict[int, int], region: _RegionWriter) -> frame_pb2.TensorSpec:
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


def _pack(tensors: Mapping[str, Tensor]) -> list[Packed]:
    """Pack the tensors into the fewest bytes that a receiver accepts.

    If they would unpack to more than it allows, some are sent with their padding, the smallest first: each byte
    sent raises the allowance for the others by MAX_EXPANSION bytes.
    """
    packed = layouts.pack(tensors)
    for at in sorted(range(len(packed)), key=lambda at: tensors[packed[at].name].nbytes):
        if unpacked_bytes(packed) <= expansion_limit(_sent_bytes(packed)):
            break
        packed[at] = layouts.pack_plainly(packed[at].name, tensors[packed[at].name])
    return packed


# ------------------------------------------------------------------------------------- receiving


def decode(header: bytes | Header, region: memoryview) -> DataProto:
    """Decode a batch.

    Dense tensors that were not narrowed are writable views of the region; all others get memory of their own.

    Args:
        header: a serialized FrameHeader, or the result of `read_header`.
        region: all of its bytes, writable, 64-byte aligned.

    Raises:
        InvalidBatch: `encode` would write this header and region for no batch.
    """
    if isinstance(header, bytes):
        header = read_header(header)
    message = header.message
    if message.region_bytes != region.nbytes:
        raise InvalidBatch(f"the header announces {message.region_bytes} bytes, {region.nbytes} arrived")
    reader = _Reader(region)
    all_spans = _AllSpans([reader.take(f"spans[{i}]", span) for i, span in enumerate(message.spans)])
    for column, spec in zip(header.tensors, message.tensors, strict=True):
        _fill(column, spec, reader, all_spans)
    columns = reader.take("columns", message.columns) if message.HasField("columns") else memoryview(b"")
    reader.check_overlap()
    meta = from_json(message.meta_json, "meta_info")
    if not isinstance(meta, dict):
        raise InvalidBatch(f"meta_info should be a JSON object; it is a {type(meta).__qualname__}")
    non_tensors = from_arrow(columns, message.num_rows)
    tensors = {column.name: _tensor(column) for column in header.tensors}
    return DataProto(tensors, non_tensors, meta, None if tensors or non_tensors else message.num_rows or None)


class _Reader:
    """Takes spans out of a region, each byte at most once."""

    def __init__(self, region: memoryview) -> None:
        self.region = region
        self._taken: list[tuple[int, int, str]] = []

    def take(self, what: str, span: frame_pb2.Span) -> memoryview:
        end = span.offset + span.num_bytes
        if span.offset % ALIGNMENT or end > self.region.nbytes:
            raise InvalidBatch(
                f"{what} lies at bytes {span.offset} to {end} of a region of {self.region.nbytes} bytes; "
                f"it should begin at a multiple of {ALIGNMENT} and end within the region"
            )
        if span.num_bytes:
            self._taken.append((span.offset, end, what))
        return self.region[span.offset : end]

    def check_overlap(self) -> None:
        self._taken.sort()
        for (_, end, what), (start, _, other) in zip(self._taken, self._taken[1:], strict=False):
            if start < end:
                raise InvalidBatch(f"{what} and {other} share bytes of the region")


def _fill(column: Packed, spec: frame_pb2.TensorSpec, reader: _Reader, all_spans: _AllSpans) -> None:
    """Set the column's spans and values from the region."""
    what = f"column {column.name!r}"
    if column.layout in WITH_SPANS:
        column.spans = all_spans.of(what, spec.span_index, column.shape)
    if column.layout in WITH_VALUES:
        data = reader.take(what, spec.data)
        num_values = math.prod(column.shape) if column.spans is None else column.spans.num_held
        if data.nbytes != num_values * column.wire_dtype.itemsize:
            raise InvalidBatch(
                f"{what}: {num_values} elements of {column.wire_dtype} do not take the {data.nbytes} bytes sent"
            )
        column.values = np.frombuffer(data, f"<u{column.wire_dtype.itemsize}")


class _AllSpans:
    """The spans in a region. Spans shared by several columns are checked once."""

    def __init__(self, parts: list[memoryview]) -> None:
        self._parts = parts
        self._checked: dict[tuple[int, int], Spans] = {}

    def of(self, what: str, index: int, shape: tuple[int, ...]) -> Spans:
        rows = math.prod(shape[:-1])
        width = shape[-1]
        if index >= len(self._parts) or self._parts[index].nbytes != rows * layouts.SPAN_ROW_BYTES:
            there = f"has {self._parts[index].nbytes} bytes" if index < len(self._parts) else "does not exist"
            raise InvalidBatch(
                f"{what} of shape {list(shape)} needs spans of {rows * layouts.SPAN_ROW_BYTES} bytes; "
                f"spans[{index}] of {len(self._parts)} {there}"
            )
        if (index, width) not in self._checked:
            starts, lengths = np.frombuffer(self._parts[index], "<i4").reshape(2, rows)
            most = min(width, 2**31 - 1)
            if rows and (starts.min() < 0 or lengths.min() < 0 or (lengths > most - starts).any()):
                raise InvalidBatch(f"{what}: spans reach outside of its rows of {width} elements")
            self._checked[index, width] = Spans(starts, lengths, width)
        return self._checked[index, width]


def _tensor(column: Packed) -> Tensor:
    if math.prod(column.shape):
        return layouts.unpack(column)
    return torch.empty(column.shape, dtype=column.dtype)
