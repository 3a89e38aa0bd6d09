"""Bytes from a stranger: always InvalidBatch, never a crash, never memory that was not sent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import fuzz_wire
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.v1 import data_pb2
from rolemesh.v1.frame_pb2 import FrameHeader
from rolemesh.wire.carrier import Terms
from rolemesh.wire.codec import dump, encode, load
from rolemesh.wire.frame import join_frame
from rolemesh.wire.streams import receive, receive_batches, send


def step_batch() -> DataProto:
    """Every layout and every encoding in one small batch of four rows."""
    mask = torch.arange(32) < torch.tensor([[5], [9], [0], [32]])
    return DataProto.from_dict(
        {
            "mask": mask,
            "positions": torch.arange(32).clamp(max=4).expand(4, 32).contiguous(),
            "ragged": torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).where(mask, 0.0),
            "constant": torch.ones(4, 7),
            "narrow": torch.arange(4) * 1000,
            "dense": torch.arange(40).reshape(4, 10).double() / 7,
            "flags": torch.tensor([True, False, False, True]),
        },
        {
            "uid": list("abcd"),
            "n": [1, 2, 3, 4],
            "chat": [[], {"k": 1}, None, 2.5],
            "raw": [b"x", None, b"", b"y"],
        },
        {"step": 1},
    )


def changed(
    change: Callable[[FrameHeader], None], batch: DataProto | None = None, region: bytes | None = None
) -> bytes:
    """A valid blob with its header changed."""
    encoded = encode(batch or step_batch())
    header = FrameHeader.FromString(encoded.header)
    change(header)
    payload = b"".join(encoded.buffers) if region is None else region
    return join_frame(header.SerializeToString(), [payload], len(payload))


def column(header: FrameHeader, name: str) -> Any:
    return next(spec for spec in header.tensors if spec.name == name)


def test_the_unchanged_batch_is_valid():
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


LIES: dict[str, Callable[[FrameHeader], None]] = {
    "region of a terabyte": lambda h: setattr(h, "region_bytes", 1 << 40),
    "region of 2**64 - 1": lambda h: setattr(h, "region_bytes", 2**64 - 1),
    "region smaller than sent": lambda h: setattr(h, "region_bytes", 64),
    "more rows": lambda h: setattr(h, "num_rows", 5),
    "2**60 rows": lambda h: setattr(h, "num_rows", 1 << 60),
    "no rows": lambda h: setattr(h, "num_rows", 0),
    "2**60 rows of no columns": lambda h: (
        h.ClearField("tensors"),
        h.ClearField("columns"),
        setattr(h, "num_rows", 1 << 60),
    ),
    "offset beyond the region": lambda h: setattr(column(h, "dense").data, "offset", 1 << 20),
    "offset that wraps": lambda h: setattr(column(h, "dense").data, "offset", 2**64 - 64),
    "offset off the boundary": lambda h: setattr(column(h, "dense").data, "offset", 8),
    "length beyond the region": lambda h: setattr(column(h, "dense").data, "num_bytes", 1 << 20),
    "one element less": lambda h: setattr(column(h, "dense").data, "num_bytes", 312),
    "tensors that overlap": lambda h: setattr(
        column(h, "flags").data, "offset", column(h, "dense").data.offset
    ),
    "shape larger than the data": lambda h: column(h, "dense").shape.__setitem__(1, 11),
    "shape whose product wraps to the right size": lambda h: column(h, "dense").shape.extend([2**63, 2]),
    "shape without axes": lambda h: column(h, "dense").ClearField("shape"),
    "shape beyond int64": lambda h: column(h, "dense").shape.__setitem__(1, 2**63),
    "constant of 2**62 elements": lambda h: column(h, "constant").shape.__setitem__(1, 2**60),
    "constant of a gigabyte": lambda h: column(h, "constant").shape.__setitem__(1, 2**26),
    "mask of a gigabyte": lambda h: column(h, "mask").shape.__setitem__(1, 2**28),
    "mask wider than int32": lambda h: column(h, "mask").shape.__setitem__(1, 2**40),
    "mask narrower than its spans": lambda h: column(h, "mask").shape.__setitem__(1, 31),
    "mask of three axes": lambda h: column(h, "mask").shape.append(1),
    "mask of rows beyond its spans": lambda h: column(h, "mask").shape.insert(1, 2),
    "mask of 2**124 rows": lambda h: [column(h, "mask").shape.insert(1, 2**62) for _ in range(2)],
    "mask of one axis": lambda h: column(h, "mask").shape.pop(),
    "spans that are not there": lambda h: setattr(column(h, "mask"), "span_index", 7),
    "spans of too few rows": lambda h: setattr(h.spans[0], "num_bytes", 24),
    "ragged with less data": lambda h: setattr(column(h, "ragged").data, "num_bytes", 4),
    "ragged without data": lambda h: column(h, "ragged").ClearField("data"),
    "ragged without fill": lambda h: column(h, "ragged").ClearField("fill"),
    "fill of the wrong size": lambda h: setattr(column(h, "constant"), "fill", b"12345"),
    "positions of floats": lambda h: setattr(column(h, "ragged"), "layout", data_pb2.LAYOUT_POSITIONS),
    "dense with a fill": lambda h: setattr(column(h, "dense"), "fill", b"12345678"),
    "mask with data": lambda h: column(h, "mask").data.CopyFrom(column(h, "dense").data),
    "unknown element type": lambda h: setattr(column(h, "dense"), "dtype", 99),
    "no element type": lambda h: column(h, "dense").ClearField("dtype"),
    "no layout": lambda h: column(h, "dense").ClearField("layout"),
    "unknown layout": lambda h: setattr(column(h, "dense"), "layout", 77),
    "float narrowed to an integer": lambda h: setattr(column(h, "dense"), "wire_dtype", data_pb2.DTYPE_UINT8),
    "integer widened": lambda h: setattr(column(h, "narrow"), "dtype", data_pb2.DTYPE_UINT8),
    "bool narrowed": lambda h: setattr(column(h, "flags"), "wire_dtype", data_pb2.DTYPE_UINT8),
    "two tensors of one name": lambda h: setattr(column(h, "dense"), "name", "narrow"),
    "a tensor and a column of one name": lambda h: setattr(column(h, "dense"), "name", "uid"),
    "meta that is no JSON": lambda h: setattr(h, "meta_json", "{'a': 1}"),
    "meta that is no object": lambda h: setattr(h, "meta_json", "[1]"),
    "meta that is empty": lambda h: setattr(h, "meta_json", ""),
    "meta nested too deep": lambda h: setattr(h, "meta_json", "[" * 200_000),
    "meta with a number of too many digits": lambda h: setattr(h, "meta_json", '{"a": ' + "9" * 5000 + "}"),
    "columns that are no Arrow": lambda h: (
        h.columns.CopyFrom(column(h, "dense").data) or column(h, "dense").Clear()
    ),
    "columns cut short": lambda h: setattr(h.columns, "num_bytes", h.columns.num_bytes // 2),
}


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
        ("dense", "dtype", 99, "'dense' has an unknown element type, 99 as"),
        ("dense", "layout", 77, "'dense' has the unknown layout 77"),
        ("dense", "wire_dtype", data_pb2.DTYPE_UINT8, r"'dense': torch\.float64 cannot travel as torch\.uint8"),
        ("constant", "fill", b"12345", "'constant' is filled with 5 bytes, an element has 4"),
        ("ragged", "layout", data_pb2.LAYOUT_POSITIONS, "'ragged'"),
        ("ragged", "layout", data_pb2.LAYOUT_CONSTANT, "'ragged': layout .* has no data"),
    ],
)
def test_what_a_column_lacks_is_said_by_its_name(name: str, field: str, value: Any, message: str):
    with pytest.raises(InvalidBatch, match=message):
        load(changed(lambda header: setattr(column(header, name), field, value)))


def test_a_shape_beyond_any_batch_is_counted_in_bytes():
    """4 rows of 2^32 + 1 float32 are 16 bytes more than 64 GiB, though a quarter of that in elements."""
    for extent, message in ((2**32 + 1, "larger than any batch"), (2**32, "claim to be")):
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


# ------------------------------------------------------------------------------------- Arrow


def arrow(batches: list[pa.RecordBatch], options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def record(array: pa.Array, encoding: str = "object", name: str = "c") -> pa.RecordBatch:
    return pa.record_batch(
        [array], schema=pa.schema([pa.field(name, array.type, metadata={"encoding": encoding})])
    )


def with_columns(data: bytes, num_rows: int = 2) -> bytes:
    header = FrameHeader(num_rows=num_rows, meta_json="{}", region_bytes=len(data))
    header.columns.num_bytes = len(data)
    return join_frame(header.SerializeToString(), [data], len(data))


def strings(offsets: list[int], data: bytes) -> bytes:
    """Two texts whose offsets and characters are then overwritten: Arrow writes no invalid array itself."""
    valid = arrow([record(pa.array(["\x07", "\x08"], pa.large_string()))])
    true, false = np.array([0, 1, 2], "<i8").tobytes(), np.array(offsets, "<i8").tobytes()
    assert valid.count(true) == valid.count(b"\x07\x08" + bytes(6)) == 1
    return valid.replace(true, false).replace(b"\x07\x08" + bytes(6), data.ljust(8, b"\0"))


TEXTS = pa.array(["x", "y"], pa.large_string())
LONG_TEXTS = pa.array(["x" * 5000] * 2, pa.large_string())
SCHEMA = record(TEXTS).schema


def of_no_known_kind(data: bytes) -> bytes:
    """The schema's message with its kind (byte 29: Message.header_type) wiped out: Arrow's library does not
    verify what follows, and a schema read from it may be read from any address."""
    assert data[29] == 1
    return data[:29] + b"\0" + data[30:]


BAD_ARROW: dict[str, bytes] = {
    "empty stream": arrow([record(TEXTS)])[:8],
    "schema alone": SCHEMA.serialize().to_pybytes(),
    "no schema first": of_no_known_kind(arrow([record(TEXTS)])),
    "two batches": arrow([record(TEXTS), record(TEXTS)]),
    "wrong number of rows": arrow([record(TEXTS.slice(0, 1))]),
    "compressed": arrow([record(LONG_TEXTS)], pa.ipc.IpcWriteOptions(compression="zstd")),
    "dictionary": arrow([record(pa.array(["x", "y"]).dictionary_encode())]),
    "nested": arrow([record(pa.array([[1], [2]]))]),
    "null type": arrow([record(pa.nulls(2))]),
    "no encoding": arrow([pa.record_batch([TEXTS], names=["c"])]),
    "unknown encoding": arrow([record(TEXTS, "pickle")]),
    "text as array": arrow([record(TEXTS, "array")]),
    "array with nulls": arrow([record(pa.array([1, None]), "array")]),
    "JSON with nulls": arrow([record(pa.array(["1", None], pa.large_string()), "json")]),
    "not JSON": arrow([record(TEXTS, "json")]),
    "JSON nested too deep": arrow([record(pa.array(["[" * 100_000, "1"], pa.large_string()), "json")]),
    "text that is not UTF-8": strings([0, 1, 2], b"\xff\xfe"),
    "text cut within a character": strings([0, 1, 2], "ü".encode()),
    "offsets that fall": strings([0, 2, 1], b"ab"),
    "offsets beyond the data": strings([0, 1, 1 << 40], b"ab"),
    "several axes, a row too short": arrow(
        [record(pa.array([b"1234", b"123"], pa.large_binary()), "array:int32:1")]
    ),
    "several axes, other bytes than the shape": arrow(
        [record(pa.array([b"1234", b"1234"], pa.large_binary()), "array:int32:2")]
    ),
    "several axes with cells that add up": arrow(
        [record(pa.array([b"12345", b"123"], pa.large_binary()), "array:int32:1")]
    ),
    "several axes of nothing with nulls": arrow(
        [record(pa.array([b"", None], pa.large_binary()), "array:int32:0")]
    ),
    "several axes with nulls": arrow([record(pa.array([b"1234", None], pa.large_binary()), "array:int32:1")]),
    "several axes of text": arrow([record(TEXTS, "array:uint8:1")]),
    "several axes of objects": arrow([record(pa.array([b"12", b"34"], pa.large_binary()), "array:object:2")]),
    "several axes of a bool that is 2": arrow(
        [record(pa.array([b"\0\1", b"\2\0"], pa.large_binary()), "array:bool:2")]
    ),
    "several axes, a shape of 10^60": arrow(
        [record(pa.array([b"", b""], pa.large_binary()), "array:int64:0" + ",9999999999" * 6)]
    ),
    "negative offsets": strings([-5, 1, 2], b"ab"),
    "two columns of one name": arrow([pa.record_batch([TEXTS, TEXTS], schema=pa.schema([*SCHEMA, *SCHEMA]))]),
    "random": np.random.default_rng(0).bytes(500),
}  # fmt: skip


def test_cells_of_several_axes_are_read_from_where_the_first_begins():
    """Offsets 4, 8 and 12: the first four bytes are no cell's."""
    valid = arrow([record(pa.array([b"1234", b"5678xxxx"], pa.large_binary()), "array:int32:1")])
    true, moved = np.array([0, 4, 12], "<i8").tobytes(), np.array([4, 8, 12], "<i8").tobytes()
    assert valid.count(true) == 1
    cells = load(with_columns(valid.replace(true, moved)))["c"]
    assert cells.tobytes() == b"5678xxxx"
    assert cells.shape == (2, 1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("several axes with cells that add up", "'c': not every cell has the 4 bytes of 'array:int32:1'"),
        ("several axes of a bool that is 2", "'c' is bool and holds 2"),
    ],
)
def test_what_cells_of_several_axes_hold_is_said(case: str, message: str):
    with pytest.raises(InvalidBatch, match=message):
        load(with_columns(BAD_ARROW[case]))


def test_valid_arrow_is_read():
    assert load(with_columns(arrow([record(TEXTS)])))["c"].tolist() == ["x", "y"]


@pytest.mark.parametrize("case", BAD_ARROW)
def test_arrow_that_to_arrow_does_not_write_is_refused(case: str):
    with pytest.raises(InvalidBatch):
        load(with_columns(BAD_ARROW[case]))


# ----------------------------------------------------------------------------------- streams


async def stream(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def frames(batch: DataProto) -> list[bytes]:
    return [message async for message in send(batch)]


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


async def test_a_batch_above_the_receivers_limit_is_refused_at_its_header():
    batch = DataProto({"x": torch.randn(1 << 16)})
    assert len(await receive(stream(*await frames(batch)), Terms(max_bytes=1 << 18))) == 1 << 16
    with pytest.raises(InvalidBatch, match="at most 262143 are accepted"):
        await receive(stream(*await frames(batch)), Terms(max_bytes=(1 << 18) - 1))


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
def test_a_mutated_header_over_the_right_bytes_is_read_or_refused(mutations: list[tuple[str, int, int, bytes]]):
    encoded = encode(step_batch())
    header = mutate(encoded.header, [(k, a % len(encoded.header), b, raw) for k, a, b, raw in mutations])
    with contextlib.suppress(InvalidBatch):
        dump(load(join_frame(header, encoded.buffers, encoded.region_bytes)))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes):
    with pytest.raises(InvalidBatch):
        load(data)


def test_a_batch_that_is_changed_along_its_structure_keeps_to_a_budget_of_time_and_memory():
    checked, accepted = fuzz_wire.run(seed=1, most=400, seconds=120)
    assert checked == 400
    assert 20 < accepted < 200


# ------------------------------------------------------------------------------------ memory

UNDER_A_LIMIT = """
import asyncio, resource
from tests.wire.test_wire_hostile import LIES, BAD_ARROW, changed, frames, stream, with_columns
from benchmarks import fuzz_wire
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
