"""Parses a batch's header and checks it against the limits, before any byte of the region is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from google.protobuf.message import DecodeError

from rolemesh.errors import InvalidBatch
from rolemesh.v1 import data_pb2, frame_pb2
from rolemesh.wire import limits
from rolemesh.wire.dtypes import FROM_WIRE, INTEGERS
from rolemesh.wire.frame import LENGTH_DELIMITED, fields
from rolemesh.wire.layouts import NARROWER, SPAN_ROW_BYTES, Packed

# Fields of FrameHeader: how many are allowed, and the bytes of each. _OTHER: unknown fields of a newer sender.
_KNOWN = {
    frame_pb2.FrameHeader.TENSORS_FIELD_NUMBER: (limits.MAX_COLUMNS, limits.MAX_SPEC_BYTES, "tensors"),
    frame_pb2.FrameHeader.SPANS_FIELD_NUMBER: (limits.MAX_COLUMNS, 64, "spans"),
    frame_pb2.FrameHeader.META_JSON_FIELD_NUMBER: (1, limits.MAX_META_BYTES, "meta_json"),
}
_OTHER = (limits.MAX_FRAME_FIELDS, limits.MAX_SPEC_BYTES, "other fields")
_MAX_FIELDS = sum(most for most, _, _ in (*_KNOWN.values(), _OTHER))

WITH_VALUES = (data_pb2.LAYOUT_DENSE, data_pb2.LAYOUT_RAGGED)
WITH_SPANS = (data_pb2.LAYOUT_RAGGED, data_pb2.LAYOUT_MASK, data_pb2.LAYOUT_POSITIONS)
_WITH_FILL = (data_pb2.LAYOUT_RAGGED, data_pb2.LAYOUT_CONSTANT)

# Estimated cost of decoding non-tensor columns, in bytes copied. Each cell is a Python object: making one takes
# as long as copying a few hundred bytes. Parsing nine bytes of JSON can take as long as copying kilobytes.
ROW_BYTES = 256
COLUMN_BYTES = 64


@dataclass(frozen=True)
class Header:
    """A header within the limits.

    Args:
        message: the header as received.
        tensors: its tensors, still without values and spans; those are in the region.
        unpacked_bytes: unpacked size of the tensors that are not views of the region.
        work_bytes: estimated cost of decoding the batch: the bytes of header, region and unpacked tensors, plus
            an estimate for the other columns (ROW_BYTES, COLUMN_BYTES).
    """

    message: frame_pb2.FrameHeader
    tensors: list[Packed]
    unpacked_bytes: int
    work_bytes: int

    @property
    def region_bytes(self) -> int:
        return int(self.message.region_bytes)


def check_num_rows(num_rows: int, num_columns: int) -> None:
    """Raise InvalidBatch for too many rows without columns; columns bound their rows by their bytes."""
    if not num_columns and num_rows > limits.MAX_VALUES:
        raise InvalidBatch(f"{num_rows} rows of no columns; at most {limits.MAX_VALUES} can be sent")


def read_header(data: bytes) -> Header:
    """Parse and check the header of a batch.

    Raises:
        InvalidBatch: not a FrameHeader, beyond a limit, or inconsistent.
    """
    check_fields(data)
    try:
        message = frame_pb2.FrameHeader.FromString(data)
    except DecodeError as error:
        raise InvalidBatch(f"not a batch's header: {error}") from None
    check_num_rows(message.num_rows, len(message.tensors) + message.columns.num_bytes)
    tensors = [_packed(spec, message.num_rows) for spec in message.tensors]
    if len({column.name for column in tensors}) < len(tensors):
        raise InvalidBatch(f"two tensors have one name: {[column.name for column in tensors]}")
    unpacked = unpacked_bytes(tensors)
    if unpacked > min(expansion_limit(message.region_bytes), limits.MAX_REGION_BYTES):
        raise InvalidBatch(
            f"a region of {message.region_bytes} bytes claims to be {unpacked} unpacked; at most "
            f"{min(expansion_limit(message.region_bytes), limits.MAX_REGION_BYTES)} are accepted"
        )
    work = len(data) + message.region_bytes + unpacked + _cells_work(message)
    return Header(message, tensors, unpacked, work)


def _cells_work(message: frame_pb2.FrameHeader) -> int:
    if not message.HasField("columns"):
        return 0
    return ROW_BYTES * int(message.num_rows) + COLUMN_BYTES * int(message.columns.num_bytes)


def unpacked_bytes(tensors: Sequence[Packed]) -> int:
    """Total unpacked size of the tensors that are not views of the region."""
    return sum(
        math.prod(column.shape) * column.dtype.itemsize
        for column in tensors
        if column.layout != data_pb2.LAYOUT_DENSE or column.dtype != column.wire_dtype
    )


def expansion_limit(region_bytes: int) -> int:
    """Maximum unpacked size of the tensors in a region of this size."""
    return limits.FREE_EXPANSION + limits.MAX_EXPANSION * region_bytes


def check_fields(data: bytes) -> None:
    """Count and measure a FrameHeader's fields before parsing it: parsed, it takes far more memory.

    Raises:
        InvalidBatch: not a protobuf message, or beyond a limit.
    """
    counts: dict[str, int] = {}
    for number, wire_type, start, end in fields(memoryview(data), _MAX_FIELDS, "a header"):
        most, most_bytes, what = _KNOWN.get(number, _OTHER)
        counts[what] = counts.get(what, 0) + 1
        if counts[what] > most:
            raise InvalidBatch(f"a header of more than {most} {what}")
        if wire_type == LENGTH_DELIMITED and end - start > most_bytes:
            raise InvalidBatch(f"a header with {end - start} bytes of {what}; at most {most_bytes} are read")


def _packed(spec: frame_pb2.TensorSpec, num_rows: int) -> Packed:
    what = f"column {spec.name!r}"
    shape = tuple(spec.shape)
    dtype = FROM_WIRE.get(spec.dtype)
    wire_dtype = FROM_WIRE.get(spec.wire_dtype)
    if dtype is None or wire_dtype is None:
        raise InvalidBatch(f"{what} has an unknown element type, {spec.dtype} sent as {spec.wire_dtype}")
    if dtype != wire_dtype and not _widens(wire_dtype, dtype):
        raise InvalidBatch(f"{what}: {dtype} cannot be sent as {wire_dtype}")
    if not 0 < len(shape) <= limits.MAX_AXES or shape[0] != num_rows:
        raise InvalidBatch(
            f"{what} of shape {list(shape)} in a batch of {num_rows} rows; expected 1 to {limits.MAX_AXES} "
            f"axes, the first of {num_rows}"
        )
    # An empty axis counts as 1: it would hide the product of the others, and [0, 2**62] overflows its strides.
    if math.prod(max(1, extent) for extent in shape) * dtype.itemsize > limits.MAX_REGION_BYTES:
        raise InvalidBatch(f"{what} of shape {list(shape)} is larger than any batch")
    if spec.layout not in data_pb2.Layout.values() or spec.layout == data_pb2.LAYOUT_UNSPECIFIED:
        raise InvalidBatch(f"{what} has the unknown layout {spec.layout}")
    expected = dtype.itemsize if spec.layout in _WITH_FILL else 0
    if len(spec.fill) != expected:
        raise InvalidBatch(f"{what} has a fill of {len(spec.fill)} bytes; its layout needs {expected}")
    if dtype == torch.bool and spec.fill not in (b"", b"\0", b"\1"):
        raise InvalidBatch(f"{what} is bool and filled with {spec.fill!r}")
    if spec.HasField("data") != (spec.layout in WITH_VALUES):
        needs = "has no" if spec.HasField("data") else "needs"
        raise InvalidBatch(f"{what}: layout {spec.layout} {needs} data")
    if spec.layout in WITH_SPANS and (len(shape) < 2 or shape[-1] * dtype.itemsize <= SPAN_ROW_BYTES):
        raise InvalidBatch(
            f"{what} of shape {list(shape)} and {dtype}: spans save nothing on one axis or on rows of at most "
            f"{SPAN_ROW_BYTES} bytes"
        )
    if spec.layout == data_pb2.LAYOUT_POSITIONS and dtype not in INTEGERS:
        raise InvalidBatch(f"{what}: positions should be integers; they are {dtype}")
    return Packed(spec.name, dtype, wire_dtype, shape, spec.layout, fill=spec.fill)


def _widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    return narrow in NARROWER and wide in INTEGERS and narrow.itemsize < wide.itemsize
