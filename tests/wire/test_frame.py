"""Frames are ordinary protobuf messages, written and read by hand."""

from __future__ import annotations

import pytest

from rolemesh.errors import InvalidBatch
from rolemesh.v1.frame_pb2 import Frame, FrameHeader
from rolemesh.wire.frame import join_frame, split_frame
from rolemesh.wire.limits import MAX_HEADER_BYTES

HEADER = FrameHeader(num_rows=3).SerializeToString()
HEADER_FIELD, PAYLOAD_FIELD = b"\x0a", b"\x7a"  # fields 1 and 15, length-delimited


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 16383, 16384])
@pytest.mark.parametrize("header", [None, HEADER])
def test_a_frame_is_what_generated_code_writes_and_is_read_back(header: bytes | None, num_bytes: int) -> None:
    payload = bytes(range(256)) * 64
    message = join_frame(header, (memoryview(payload)[:num_bytes],), num_bytes)
    generated = Frame(payload=payload[:num_bytes])
    if header is not None:
        generated.header.ParseFromString(header)
    assert Frame.FromString(message) == generated
    if num_bytes:  # an empty payload may be written or left out
        assert message == generated.SerializeToString()
    read, data = split_frame(message)
    assert (read, bytes(data)) == (header, payload[:num_bytes])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (HEADER_FIELD + b"\x00" + HEADER_FIELD + b"\x00", "field 1 twice"),
        (PAYLOAD_FIELD + b"\x00" + PAYLOAD_FIELD + b"\x00", "field 15 twice"),
        (b"\x08\x01", "field 1 twice or of wire type 0"),
        (b"\x78\x01", "field 15 twice or of wire type 0"),
        (HEADER_FIELD + b"\x00" + b"\x08\x01", "field 1 twice or of wire type 0"),
    ],
)
def test_a_field_twice_or_of_another_wire_type_is_refused(message: bytes, words: str) -> None:
    with pytest.raises(InvalidBatch, match=words):
        split_frame(message)


def test_a_header_above_the_limit_is_refused_with_its_length() -> None:
    beyond = bytes(MAX_HEADER_BYTES + 1)
    with pytest.raises(InvalidBatch, match=f"a header of {len(beyond)} bytes; at most {MAX_HEADER_BYTES}"):
        split_frame(PAYLOAD_FIELD + b"\x00" + join_frame(beyond, (), 0))
