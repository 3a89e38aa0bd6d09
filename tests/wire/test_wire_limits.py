"""What a batch may be at most: sender and receiver keep to the same limits, and real batches are far below."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from benchmarks.wire.hostile_messages import arrow, field, frame, record
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.v1 import data_pb2
from rolemesh.v1.frame_pb2 import FrameHeader
from rolemesh.wire import limits
from rolemesh.wire.codec import dump, encode, load
from rolemesh.wire.frame import join_frame, split_frame
from rolemesh.wire.header import read_header
from rolemesh.wire.json_text import num_values
from rolemesh.wire.streams import receive


def of_objects(**columns: list[Any]) -> DataProto:
    made = {name: np.fromiter(cells, dtype=object, count=len(cells)) for name, cells in columns.items()}
    return DataProto.from_dict(non_tensors=made)


def described(array: pa.Array, **metadata: str) -> bytes:
    return arrow(pa.record_batch([array], schema=pa.schema([pa.field("c", array.type, metadata=metadata)])))


def with_arrow(data: bytes, num_rows: int) -> bytes:
    header = FrameHeader(num_rows=num_rows, meta_json="{}", region_bytes=len(data))
    header.columns.num_bytes = len(data)
    return frame(header, data)


# -------------------------------------------------------------------------------- what is documented


def test_the_documented_table_has_exactly_the_limits():
    """Every limit with its number, and no other."""
    text = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    table = text.split("### Limits\n")[1].split("\nA JSON value is")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line][2:]
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    documented = {}
    for _, value, name, *_ in rows:
        number, _, unit = value.partition(" ")
        documented[name.strip("`")] = int(number.replace(",", "")) * units[unit]
    assert len(documented) == len(rows)
    assert documented == {name: value for name, value in vars(limits).items() if name.isupper()}


# ---------------------------------------------------------------------------------- what is sent


def test_a_large_step_is_far_below_every_limit():
    """8,192 rows with 40 tensors, and JSON cells of 5 kB and of 50 values."""
    rows = 8192
    batch = DataProto.from_dict(
        {f"tensor {i}": torch.arange(rows)[:, None].expand(rows, 4) + i for i in range(40)},
        {
            "uid": [f"prompt {i}" for i in range(rows)],
            "data_source": ["code"] * rows,
            "reward_model": [{"style": "rule", "ground_truth": {"inputs": ["1 2"] * 20, "outputs": ["3"] * 20}}]
            * rows,
            "extra_info": [{"index": i, "question": "how many, " * 500} for i in range(rows)],
        },
        {"global_token_num": list(range(rows))},
    )
    back = load(dump(batch))
    assert back["reward_model"].tolist() == batch["reward_model"].tolist()
    assert back["extra_info"].tolist() == batch["extra_info"].tolist()
    header = encode(batch).header
    assert len(header) < limits.MAX_HEADER_BYTES / 16
    assert len(batch) * 4 * 12 < limits.MAX_VALUES
    assert len(batch) * 50 < limits.MAX_VALUES / 4


def nested(number: int) -> list[Any]:
    return [0] * (number - 1)  # a list is a value too


TOO_MUCH: dict[str, tuple[Callable[[], DataProto], Callable[[], DataProto], str]] = {
    "tensors": (
        lambda: DataProto({f"t{i}": torch.zeros(1) for i in range(limits.MAX_COLUMNS)}),
        lambda: DataProto({f"t{i}": torch.zeros(1) for i in range(limits.MAX_COLUMNS + 1)}),
        "257 tensors; at most 256",
    ),
    "non-tensor columns": (
        lambda: of_objects(**{f"c{i}": ["x"] for i in range(limits.MAX_COLUMNS)}),
        lambda: of_objects(**{f"c{i}": ["x"] for i in range(limits.MAX_COLUMNS + 1)}),
        "257 non-tensor columns; at most 256",
    ),
    "a tensor's name": (
        lambda: DataProto({"ü" * (limits.MAX_NAME_BYTES // 2): torch.zeros(1)}),
        lambda: DataProto({"ü" * (limits.MAX_NAME_BYTES // 2 + 1): torch.zeros(1)}),
        "1026 bytes, at most 1024",
    ),
    "a non-tensor column's name": (
        lambda: of_objects(**{"n" * limits.MAX_NAME_BYTES: ["x"]}),
        lambda: of_objects(**{"n" * (limits.MAX_NAME_BYTES + 1): ["x"]}),
        "1025 bytes, at most 1024",
    ),
    "axes": (
        lambda: DataProto({"t": torch.zeros([1] * limits.MAX_AXES)}),
        lambda: DataProto({"t": torch.zeros([1] * (limits.MAX_AXES + 1))}),
        "'t' has 17 axes, at most 16",
    ),
    "meta_info": (
        lambda: DataProto(meta_info={"x": "y" * (limits.MAX_META_BYTES - 8)}),
        lambda: DataProto(meta_info={"x": "y" * (limits.MAX_META_BYTES - 7)}),
        "make large meta_info a column",
    ),
    "values in meta_info": (
        lambda: DataProto(meta_info={"x": nested(limits.MAX_JSON_VALUES - 1)}),
        lambda: DataProto(meta_info={"x": nested(limits.MAX_JSON_VALUES + 1)}),
        "meta_info holds 131074 JSON values",
    ),
    "values in a cell": (
        lambda: of_objects(c=[nested(limits.MAX_JSON_VALUES)]),
        lambda: of_objects(c=[nested(limits.MAX_JSON_VALUES + 1)]),
        "column 'c', row 0, holds 131073 JSON values",
    ),
    "values in all cells": (
        lambda: of_objects(c=[nested(1 << 16)] * 32),
        lambda: of_objects(c=[nested(1 << 16)] * 32 + [[]]),
        "2097154 JSON values, at most 2097152",
    ),
    "cells": (
        lambda: of_objects(a=[True] * (limits.MAX_VALUES // 2), b=[None] * (limits.MAX_VALUES // 2)),
        lambda: of_objects(a=[True] * (limits.MAX_VALUES // 2 + 1), b=[None] * (limits.MAX_VALUES // 2 + 1)),
        "2 non-tensor columns of 1048577 rows",
    ),
    "bytes of a cell": (
        lambda: of_objects(c=[b"", b"x" * limits.MAX_CELL_BYTES]),
        lambda: of_objects(c=[b"", b"x" * (limits.MAX_CELL_BYTES + 1)]),
        "'c' has a cell of 16777217 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", TOO_MUCH)
def test_a_sender_refuses_one_above_a_limit_by_name(limit: str):
    """A receiver takes the limit itself."""
    at_most, beyond, message = TOO_MUCH[limit]
    assert len(load(dump(at_most()))) == len(at_most())
    with pytest.raises(InvalidBatch, match=message):
        dump(beyond())


def test_commas_and_brackets_in_strings_are_no_values():
    text = r'{"a, [{": "\"],[{\\", "b": [1, {"c": "\\\\\","}]}'
    assert num_values(text) == 1 + 3 + 2  # the outer object; three that open within; two commas outside strings
    code = {"tests": '1,2,3,[{"x": "\\"}],' * (limits.MAX_JSON_VALUES // 4)}
    assert load(dump(of_objects(c=[code])))["c"].tolist() == [code]


# ------------------------------------------------------------------------------ what a stranger sends


def varint_fields(number: int) -> bytes:
    return b"\x10\x00" * number


def test_a_frame_has_some_fields_of_a_newer_sender_and_not_many():
    blob = dump(DataProto({"x": torch.tensor([1.5, 2.5])}))
    assert len(load(blob + varint_fields(30))) == 2
    with pytest.raises(InvalidBatch, match="a frame of more than 32 fields"):
        load(blob + varint_fields(31))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (field(4, b" " * (limits.MAX_HEADER_BYTES - 4)), "bytes of meta_json; at most 1048576"),
        (field(4, b" " * limits.MAX_HEADER_BYTES), "a header of 20971.. bytes"),
        (field(2, b"") * 257, "more than 256 tensors"),
        (field(6, b"") * 257, "more than 256 spans"),
        (field(6, bytes(65)), "65 bytes of spans"),
        (field(4, b"{}") * 2, "more than 1 meta_json"),
        (field(2, field(4, bytes(4096))), "bytes of tensors; at most 4096"),
        (field(2, b"\x08\x01\x10\x01\x18\x01" + field(4, b"\x01" * 17)), "an unknown element type|of shape"),
        (field(7, b"") * 33, "more than 32 other fields"),
        (field(7, bytes(4097)), "bytes of other fields"),
        (b"\x08\x01" * 33, "more than 32 other fields"),
    ],
)
def test_a_header_beyond_a_limit_is_refused_before_it_is_parsed(header: bytes, message: str):
    with pytest.raises(InvalidBatch, match=message):
        load(join_frame(header, [], 0))


def test_a_header_that_claims_rows_without_end_is_refused():
    for rows in (1 << 40, 2**64 - 1):
        data = arrow(record([pa.array([1])], "array"))
        with pytest.raises(InvalidBatch, match=f"1 non-tensor columns of {rows} rows"):
            load(with_arrow(data, rows))


def test_a_shape_that_could_not_be_sent_again_is_refused():
    header = FrameHeader(meta_json="{}")
    spec = header.tensors.add(name="x", layout=data_pb2.LAYOUT_DENSE, shape=[0, 1 << 62])
    spec.dtype = spec.wire_dtype = data_pb2.DTYPE_FLOAT32
    spec.data.num_bytes = 0
    with pytest.raises(InvalidBatch, match="larger than any batch"):
        load(join_frame(header.SerializeToString(), [], 0))
    spec.shape[1] = 1 << 20
    assert load(dump(load(join_frame(header.SerializeToString(), [], 0))))["x"].shape == (0, 1 << 20)


def test_rows_that_spans_do_not_shrink_are_sent_dense_or_refused():
    header = FrameHeader(num_rows=1, meta_json="{}", region_bytes=8)
    header.spans.add(num_bytes=8)
    spec = header.tensors.add(name="m", layout=data_pb2.LAYOUT_MASK, shape=[1, 8])
    spec.dtype = spec.wire_dtype = data_pb2.DTYPE_BOOL
    with pytest.raises(InvalidBatch, match="spans save nothing"):
        load(join_frame(header.SerializeToString(), [bytes(8)], 8))
    spec.shape[1] = 9
    assert load(join_frame(header.SerializeToString(), [bytes(8)], 8))["m"].tolist() == [[False] * 9]


LONG = pa.array(["x" * 1000] * 2, pa.large_string())
TWO = arrow(record([LONG, LONG], "object"))


def sharing() -> bytes:
    """The characters of either column are in a buffer that begins where the first one's do and goes on to the
    end: what the description says of both buffers is replaced."""
    body = TWO.find(np.array([0, 1000, 2000], "<i8").tobytes())
    places = [TWO.find(b"x" * 2000) - body, TWO.rfind(b"x" * 2000) - body]
    both = np.array([places[0], len(TWO) - 8 - body - places[0]], "<i8").tobytes()
    data = TWO
    for place in places:
        buffer = np.array([place, 2000], "<i8").tobytes()
        assert data.count(buffer) == 1
        data = data.replace(buffer, both)
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (sharing(), "share bytes"),
        (described(LONG, encoding="object", note="y"), "metadata besides its encoding"),
        (described(LONG, encoding="x" * 96), "is large_string with encoding 'xxx"),
        (described(LONG, encoding="x" * 97), "metadata besides its encoding"),
        (arrow(record([LONG], "object").replace_schema_metadata({"k": "v"})), "metadata as a whole"),
        (described(pa.array([[1], [2]]), encoding="object"), "nested or of type 12"),
        (described(pa.array(["x", "y"]).dictionary_encode(), encoding="object"), "nested or of type"),
        (described(pa.array([0, 1], pa.timestamp("s", "UTC")), encoding="array"), "of type 10"),
        (arrow(record([pa.array([1, 2])] * 257, "array")), "257 non-tensor columns; at most 256"),
        (arrow(record([pa.array([1, 2])] * 9000, "array")), "at most 524288 are read"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f" + TWO[8:], "at most 524288 are read"),
        (TWO[4:], "at most 524288 are read"),  # as Arrow wrote before 0.15: without the mark
        (TWO + TWO, "more than one record batch"),
        (TWO[:6], "cannot be read"),
    ],
)
def test_an_arrow_description_that_would_grow_is_refused(data: bytes, message: str):
    assert load(with_arrow(TWO, 2))["c1"].tolist() == LONG.to_pylist()
    with pytest.raises(InvalidBatch, match=message):
        load(with_arrow(data, 2))


# -------------------------------------------------------------------------------- unpacked columns


def claiming(
    num_rows: int, width: int, layout: data_pb2.Layout, number: int, rest: int = 0
) -> tuple[bytes, int]:
    """int8 columns of one layout that share a mask's spans, and the bytes that they unpack to."""
    region = np.zeros(2 * num_rows, "<i4")
    region[num_rows:] = min(width, 128)
    header = FrameHeader(num_rows=num_rows, meta_json="{}", region_bytes=8 * num_rows + rest)
    header.spans.add(num_bytes=8 * num_rows)
    for i in range(number):
        spec = header.tensors.add(name=f"c{i}", layout=layout, shape=[num_rows, width])
        spec.dtype = spec.wire_dtype = data_pb2.DTYPE_INT8
    payload = region.tobytes() + bytes(rest)
    return join_frame(header.SerializeToString(), [payload], len(payload)), number * num_rows * width


def test_a_claim_above_the_limit_is_refused_by_its_header_alone():
    blob, claimed = claiming(1 << 18, 512, data_pb2.LAYOUT_MASK, 8)
    assert claimed == 1 << 30
    with pytest.raises(InvalidBatch, match="2097152 bytes claims to be 1073741824"):
        load(blob)
    allowed, claimed = claiming(1 << 18, 96, data_pb2.LAYOUT_MASK, 8)
    assert claimed == limits.FREE_EXPANSION + limits.MAX_EXPANSION * (2 << 20)
    assert load(allowed)["c7"].sum() == 96 << 18


def test_a_sender_claiming_too_much_sends_small_columns_padded():
    """The smallest columns keep their padding."""
    mask = torch.arange(1 << 15) < torch.full((1024, 1), 3)
    batch = DataProto({"wide": mask.long(), "narrow": mask})  # 256 and 32 MiB of 8 KiB
    specs = FrameHeader.FromString(encode(batch).header).tensors
    assert [data_pb2.Layout.Name(spec.layout) for spec in specs] == ["LAYOUT_MASK", "LAYOUT_DENSE"]
    back = load(dump(batch))
    assert all(torch.equal(back[name], batch[name]) for name in batch.columns)


async def test_decoding_a_much_packed_batch_does_not_block_the_loop():
    """The event loop goes on meanwhile."""
    blob, claimed = claiming(1 << 18, 96, data_pb2.LAYOUT_MASK, 8)
    data = split_frame(blob)[0]
    assert data is not None
    assert read_header(data).work_bytes > claimed

    async def one() -> AsyncIterator[bytes]:
        yield blob

    turns = 0
    receiving = asyncio.create_task(receive(one()))
    while not receiving.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(receiving.result()) == 1 << 18
    assert turns > 20


PEAK = """
import resource, sys
import torch
from tests.wire.test_wire_limits import claiming
from rolemesh.wire import limits
from rolemesh.wire.codec import load
from rolemesh.v1 import data_pb2

load(claiming(4, 600, data_pb2.LAYOUT_MASK, 1)[0])  # whatever is loaded on first use
MIB = 1 << 20
for layout in (data_pb2.LAYOUT_MASK, data_pb2.LAYOUT_POSITIONS):
    for rows, width, number in ((1 << 18, 96, 8), (1 << 12, 6144, 5), (4, 16 << 20, 2), (1, 110 << 20, 1)):
        blob, claimed = claiming(rows, width, layout, number, rest=MIB)
        assert claimed > 100 * MIB
        mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        allowed = mapped + claimed + 2 * len(blob) + 16 * MIB
        resource.setrlimit(resource.RLIMIT_AS, (allowed, -1))
        batch = load(blob)
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        first = batch["c0"][0, : min(width, 128)]
        expected = torch.ones(len(first)) if layout == data_pb2.LAYOUT_MASK else torch.arange(len(first))
        assert torch.equal(first, expected.to(torch.int8)), first
        del batch, first
print("within the bound")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unpacking_takes_columns_region_and_16_mebibytes():
    done = subprocess.run(
        [sys.executable, "-c", PEAK],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout == "within the bound\n", done.stderr
