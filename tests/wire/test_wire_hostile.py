"""Bytes from a stranger: always InvalidBatch, never a crash, never memory that was not sent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_batches import (
    LIES,
    changed,
    column,
    frames,
    step_batch,
    stream,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.wire import fuzz_wire
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.v1 import data_pb2
from rolemesh.v1.frame_pb2 import FrameHeader
from rolemesh.wire.carrier import ReceiveConditions
from rolemesh.wire.codec import dump, encode, load
from rolemesh.wire.frame import join_frame
from rolemesh.wire.streams import receive, receive_batches


def test_the_batch_that_the_hostile_ones_change_is_valid():
    assert len(load(changed(lambda header: None))) == 4


def test_every_truncation_is_refused():
    blob = dump(step_batch())
    for length in range(len(blob)):
        with pytest.raises(InvalidBatch):
            load(blob[:length])


def test_bytes_after_the_batch_are_refused():
    for rest in (b"\x00", b"\x7a\x01x", b"\x0a\x00", b"\xff" * 11, b"\x13", b"\x78\x01"):
        with pytest.raises(InvalidBatch):
            load(dump(step_batch()) + rest)


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie: str):
    with pytest.raises(InvalidBatch):
        load(changed(LIES[lie]))


def test_spans_that_leave_the_row_are_refused():
    encoded = encode(step_batch())
    header = FrameHeader.FromString(encoded.header)
    start = header.spans[0].offset
    for bad in ([-1, 0, 0, 0], [2**31 - 1] * 4, [28, 0, 0, 0]):
        region = bytearray(b"".join(encoded.buffers))
        region[start : start + 16] = np.array(bad, "<i4").tobytes()
        with pytest.raises(InvalidBatch, match="spans"):
            load(changed(lambda header: None, region=bytes(region)))
        region[start : start + 16] = bytes(16)
        region[start + 16 : start + 32] = np.array(bad, "<i4").tobytes()
        with pytest.raises(InvalidBatch):
            load(changed(lambda header: None, region=bytes(region)))


def test_a_bool_that_is_neither_zero_nor_one_is_refused():
    encoded = encode(step_batch())
    offset = column(FrameHeader.FromString(encoded.header), "flags").data.offset
    region = bytearray(b"".join(encoded.buffers))
    region[offset + 1] = 2
    with pytest.raises(InvalidBatch, match="bool"):
        load(changed(lambda header: None, region=bytes(region)))


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("dense", "dtype", 99, "'dense' has an unknown element type, 99 sent as"),
        ("dense", "layout", 77, "'dense' has the unknown layout 77"),
        (
            "dense",
            "wire_dtype",
            data_pb2.DTYPE_UINT8,
            r"'dense': torch\.float64 cannot be sent as torch\.uint8",
        ),
        ("constant", "fill", b"12345", "'constant' has a fill of 5 bytes; its layout needs 0"),
        ("ragged", "fill", b"12345", "'ragged' has a fill of 5 bytes; its layout needs 4"),
        ("ragged", "layout", data_pb2.LAYOUT_POSITIONS, "'ragged'"),
        ("ragged", "layout", data_pb2.LAYOUT_CONSTANT, "'ragged': layout .* has no data"),
    ],
)
def test_the_error_of_a_bad_header_names_the_column(name: str, field: str, value: Any, message: str):
    with pytest.raises(InvalidBatch, match=message):
        load(changed(lambda header: setattr(column(header, name), field, value)))


def test_a_shape_beyond_any_batch_is_counted_in_bytes():
    """4 rows of 2^32 + 1 float32 are 16 bytes more than 64 GiB, though a quarter of that in elements."""
    for extent, message in ((2**32 + 1, "larger than any batch"), (2**32, "claims to be")):
        with pytest.raises(InvalidBatch, match=message):
            load(changed(lambda header, extent=extent: column(header, "constant").shape.__setitem__(1, extent)))


@pytest.mark.parametrize("padding", [False, True])
def test_a_bool_may_be_filled_with_either(padding: bool):
    mask = torch.arange(300) < torch.tensor([[50], [90], [0], [200]])
    drawn = torch.rand(4, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    batch = DataProto({"mask": mask, "done": torch.where(mask, drawn, padding)})
    sent = column(FrameHeader.FromString(encode(batch).header), "done")
    assert (sent.layout, sent.fill) == (data_pb2.LAYOUT_RAGGED, bytes([padding]))
    assert torch.equal(load(dump(batch))["done"], batch["done"])


def test_names_that_are_not_utf8_are_refused():
    blob = dump(step_batch())
    with pytest.raises(InvalidBatch):
        load(blob.replace(b"ragged", b"ragg\xff\xfe"))


def test_positions_beyond_their_type_are_refused():
    mask = torch.ones(4, 300, dtype=torch.int64)
    mask[0, 0] = 0
    batch = DataProto({"mask": mask, "positions": (mask.cumsum(1) - 1).clamp(min=0)})

    def narrow(header: FrameHeader) -> None:
        positions = column(header, "positions")
        assert positions.layout == data_pb2.LAYOUT_POSITIONS
        positions.dtype = positions.wire_dtype = data_pb2.DTYPE_INT8

    with pytest.raises(InvalidBatch, match="cannot count"):
        load(changed(narrow, batch))


# ----------------------------------------------------------------------------------- streams


async def test_a_stream_ends_with_its_batch():
    large = await frames(DataProto({"x": torch.randn(3 << 18)}))
    small = await frames(step_batch())
    assert (len(large), len(small)) == (3, 1)
    for broken in (
        [],
        large[:-1],
        large[1:],
        [large[0], large[2]],
        [*large, *small],
        [*large, large[1]],
        [*small, *small],
        [large[0], *small],
        [large[0], b"", large[1], large[2]],
        [b"", *small],
        [*small, b""],
    ):
        with pytest.raises(InvalidBatch):
            await receive(stream(*broken))
    assert len(await receive(stream(*large))) == 3 << 18


async def test_batches_that_follow_one_another_are_taken_apart():
    small, large = step_batch(), DataProto({"x": torch.randn(1 << 19)})
    messages = [*await frames(small), *await frames(large), *await frames(DataProto()), *await frames(small)]
    assert [len(batch) async for batch in receive_batches(stream(*messages))] == [4, 1 << 19, 0, 4]
    with pytest.raises(InvalidBatch):
        [batch async for batch in receive_batches(stream(*messages[:2]))]


async def test_a_batch_above_the_receivers_limit_fails_at_its_header():
    batch = DataProto({"x": torch.randn(1 << 16)})
    assert len(await receive(stream(*await frames(batch)), ReceiveConditions(max_bytes=1 << 18))) == 1 << 16
    with pytest.raises(InvalidBatch, match="at most 262143 are accepted"):
        await receive(stream(*await frames(batch)), ReceiveConditions(max_bytes=(1 << 18) - 1))


# -------------------------------------------------------------------------------------- fuzz

BLOB = dump(step_batch())
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "cut", "insert", "copy"]),
        st.integers(0, len(BLOB)),
        st.integers(0, len(BLOB)),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=6,
)


def mutate(blob: bytes, mutations: list[tuple[str, int, int, bytes]]) -> bytes:
    data = bytearray(blob)
    for kind, at, other, raw in mutations:
        if kind == "flip" and data:
            data[at % len(data)] ^= 1 << (other % 8)
        elif kind == "set":
            data[at : at + len(raw)] = raw
        elif kind == "cut":
            del data[at : at + other % 16]
        elif kind == "insert":
            data[at:at] = raw
        else:
            data[at : at + 16] = data[other : other + 16]
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(MUTATIONS)
def test_a_mutated_batch_is_read_or_refused(mutations: list[tuple[str, int, int, bytes]]):
    try:
        batch = load(mutate(BLOB, mutations))
    except InvalidBatch:
        return
    repr(batch)
    dump(batch)  # whatever was read is a whole batch


@settings(max_examples=300, deadline=None)
@given(MUTATIONS)
def test_a_mutated_header_over_valid_bytes_is_read_or_refused(mutations: list[tuple[str, int, int, bytes]]):
    encoded = encode(step_batch())
    header = mutate(encoded.header, [(k, a % len(encoded.header), b, raw) for k, a, b, raw in mutations])
    with contextlib.suppress(InvalidBatch):
        dump(load(join_frame(header, encoded.buffers, encoded.region_bytes)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes):
    with pytest.raises(InvalidBatch):
        load(data)


def test_a_structurally_mutated_batch_keeps_to_its_budget():
    """The budget is of time and memory."""
    checked, accepted = fuzz_wire.run(seed=1, most=400, seconds=120)
    assert checked == 400
    assert 20 < accepted < 200


# ------------------------------------------------------------------------------------ memory

UNDER_A_LIMIT = """
import asyncio, resource
from tests.support.rows.hostile_batches import LIES, BAD_ARROW, changed, frames, stream, with_columns
from benchmarks.wire import fuzz_wire
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.wire.codec import load
from rolemesh.wire.streams import receive
from rolemesh.v1.frame_pb2 import FrameHeader, Frame

def refused(blob):
    try:
        load(blob)
    except InvalidBatch as error:
        assert "no memory" not in str(error), error
        return True
    return False

load(changed(lambda header: None))  # whatever is loaded on first use
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (192 << 20), mapped + (192 << 20)))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for lie in LIES.values():
    assert refused(changed(lie))
for data in BAD_ARROW.values():
    assert refused(with_columns(data))
for claimed in (60 << 30, 1 << 30):
    first = Frame(header=FrameHeader(meta_json="{}", region_bytes=claimed), payload=b"x").SerializeToString()
    try:
        asyncio.run(receive(stream(first)))
        raise SystemExit("accepted")
    except InvalidBatch as error:
        assert "ended after 1" in str(error), error
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
assert grown < 24 << 20, grown
print("all refused")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_lie_costs_memory():
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "all refused\n", done.stderr
