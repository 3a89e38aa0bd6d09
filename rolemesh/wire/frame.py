"""Serializes and parses the Frame message (proto/rolemesh/v1/frame.proto) by hand.

Generated code copies a `bytes` field several times. This module joins it once and slices it without a copy. It
writes ordinary Frame messages, and reads every Frame that a protobuf library writes within the limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rolemesh.errors import InvalidBatch
from rolemesh.wire.limits import MAX_FRAME_FIELDS, MAX_HEADER_BYTES

_HEADER_FIELD = 1
_PAYLOAD_FIELD = 15
LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}  # wire types of fixed64 and fixed32


def join_frame(header: bytes | None, payload: Iterable[memoryview | bytes], num_bytes: int) -> bytes:
    """Serialize a Frame.

    Args:
        header: a serialized FrameHeader in a batch's first frame, else None.
        payload: the pieces of the payload.
        num_bytes: their total size.
    """
    head = b"" if header is None else _tag(_HEADER_FIELD, len(header)) + header
    if not num_bytes:
        return head
    return b"".join((head, _tag(_PAYLOAD_FIELD, num_bytes), *payload))


def split_frame(message: bytes | memoryview) -> tuple[bytes | None, memoryview]:
    """Parse a Frame into its header (None if absent) and its payload, a slice of the message.

    Raises:
        InvalidBatch: not a protobuf message, header or payload twice, or more fields or a larger header than
            the limits allow (rolemesh/wire/limits.py).
    """
    view = memoryview(message).cast("B")
    header: bytes | None = None
    payload: memoryview | None = None
    for field, wire_type, start, end in fields(view, MAX_FRAME_FIELDS, "a frame"):
        if field not in (_HEADER_FIELD, _PAYLOAD_FIELD):
            continue  # unknown field from a newer sender
        if wire_type != LENGTH_DELIMITED or (header if field == _HEADER_FIELD else payload) is not None:
            raise InvalidBatch(f"not a frame: field {field} twice or of wire type {wire_type}")
        if field == _PAYLOAD_FIELD:
            payload = view[start:end]
            continue
        if end - start > MAX_HEADER_BYTES:
            raise InvalidBatch(f"a header of {end - start} bytes; at most {MAX_HEADER_BYTES} are read")
        header = bytes(view[start:end])
    return header, view[:0] if payload is None else payload


def fields(view: memoryview, most: int, what: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field of a serialized message: number, wire type, start and end of the value.

    Args:
        view: the message.
        most: how many fields are allowed.
        what: names the message in errors.

    Raises:
        InvalidBatch: not a protobuf message, or one with more than `most` fields.
    """
    at = 0
    for _ in range(most):
        if at == len(view):
            return
        tag, at = _varint(view, at)
        field = tag >> 3
        wire_type = tag & 7
        if not 0 < field < 2**29:
            raise InvalidBatch(f"not {what}: field number {field}")
        start, at = _value(view, at, wire_type)
        yield field, wire_type, start, at
    if at < len(view):
        raise InvalidBatch(f"{what} of more than {most} fields")


def _value(view: memoryview, at: int, wire_type: int) -> tuple[int, int]:
    """Return start and end of a field's value. Raises InvalidBatch if it reaches beyond the message."""
    if wire_type == 0:
        start = at
        end = _varint(view, at)[1]
    elif wire_type == LENGTH_DELIMITED:
        length, start = _varint(view, at)
        end = start + length
    elif wire_type in _FIXED_BYTES:
        start = at
        end = at + _FIXED_BYTES[wire_type]
    else:
        raise InvalidBatch(f"not a protobuf message: wire type {wire_type}")
    if end > len(view):
        raise InvalidBatch(f"a message of {len(view)} bytes has a field that ends at {end}")
    return start, end


def _tag(field: int, length: int) -> bytes:
    out = bytearray([field << 3 | LENGTH_DELIMITED])
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if at >= len(view):
            raise InvalidBatch("a message ends within a number")
        octet = view[at]
        at += 1
        value |= (octet & 127) << shift
        if octet < 128:
            return value & (2**64 - 1), at
        shift += 7
    raise InvalidBatch("not a protobuf message: a number of more than 64 bits")
