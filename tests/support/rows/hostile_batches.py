"""A small batch with every layout, and the ways in which a sender could make it invalid: wrong headers, and
wrong Arrow data."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rolemesh.dataproto import DataProto
from rolemesh.v1 import data_pb2
from rolemesh.v1.frame_pb2 import FrameHeader
from rolemesh.wire.codec import encode
from rolemesh.wire.frame import join_frame
from rolemesh.wire.streams import send


def step_batch() -> DataProto:
    """Make a small batch of four rows with every layout and every encoding."""
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
    """Encode a valid batch, and change its header."""
    encoded = encode(batch or step_batch())
    header = FrameHeader.FromString(encoded.header)
    change(header)
    payload = b"".join(encoded.buffers) if region is None else region
    return join_frame(header.SerializeToString(), [payload], len(payload))


def column(header: FrameHeader, name: str) -> Any:
    return next(spec for spec in header.tensors if spec.name == name)


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
    """Write two texts, then overwrite offsets and characters, because Arrow itself writes no invalid array."""
    valid = arrow([record(pa.array(["\x07", "\x08"], pa.large_string()))])
    true, false = np.array([0, 1, 2], "<i8").tobytes(), np.array(offsets, "<i8").tobytes()
    assert valid.count(true) == valid.count(b"\x07\x08" + bytes(6)) == 1
    return valid.replace(true, false).replace(b"\x07\x08" + bytes(6), data.ljust(8, b"\0"))


TEXTS = pa.array(["x", "y"], pa.large_string())
LONG_TEXTS = pa.array(["x" * 5000] * 2, pa.large_string())
SCHEMA = record(TEXTS).schema


def of_no_known_kind(data: bytes) -> bytes:
    """Set the kind of the schema's message to 0 (byte 29: Message.header_type).

    Arrow's library then does not verify the rest, and may read a schema from any address.
    """
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


async def stream(*messages: bytes) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def frames(batch: DataProto) -> list[bytes]:
    return [message async for message in send(batch)]
