"""Messages that a stranger might send to stop a role: each is cheap to make, and large in what it claims.

Used by `python -m benchmarks.wire.hostile` and by tests/wire/test_hostile_messages.py. All are answered with an
error; docs/wire.md has the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pyarrow as pa

from rolemesh.v1 import data_pb2
from rolemesh.v1.frame_pb2 import FrameHeader, TensorSpec
from rolemesh.wire.frame import join_frame

MIB = 1 << 20
MAX_BYTES = 63 * MIB  # gRPC takes 64 MiB, tags and lengths included
BATCH_METHOD = "/rolemesh.v1.RewardService/ComputeScores"
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
REFLECTION_METHOD = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def frame(header: FrameHeader | bytes, region: bytes = b"") -> bytes:
    data = header if isinstance(header, bytes) else header.SerializeToString()
    return join_frame(data, [region], len(region))


def field(number: int, value: bytes) -> bytes:
    """A length-delimited field."""
    length = len(value)
    octets = bytearray()
    while length > 127:
        octets.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *octets, length]) + value


def filled(unit: bytes, num_bytes: int) -> bytes:
    return unit * (num_bytes // len(unit))


# ---------------------------------------------------------------------------------- frames and headers


def unknown_fields(num_bytes: int) -> bytes:
    return filled(b"\x10\x00", num_bytes)  # field 2, varint 0


def one_unknown_field(num_bytes: int) -> bytes:
    return field(2, bytes(num_bytes))


def tensor_specs(num_bytes: int) -> bytes:
    return frame(filled(field(2, b""), num_bytes))


def spans(num_bytes: int) -> bytes:
    return frame(filled(field(6, b""), num_bytes))


def fields_of_a_header(num_bytes: int) -> bytes:
    return frame(unknown_fields(num_bytes))


def one_shape(num_bytes: int) -> bytes:
    return frame(field(2, field(4, bytes(num_bytes))))


def long_name(num_bytes: int) -> bytes:
    return frame(FrameHeader(tensors=[TensorSpec(name="n" * num_bytes)]))


def many_axes(num_bytes: int) -> bytes:
    """As large a header as is read, of shapes as long as are read."""
    spec = field(2, field(4, bytes(4000)))
    return frame(spec * 255)


def rows_without_end(num_bytes: int) -> bytes:
    return frame(FrameHeader(num_rows=1 << 40, meta_json="{}", region_bytes=1 << 40), bytes(num_bytes))


def half_a_region(num_bytes: int) -> bytes:
    """All that is sent fits; the other 63 GiB never come."""
    return frame(
        FrameHeader(num_rows=1, meta_json="{}", region_bytes=63 << 30, columns={"num_bytes": 64}),
        bytes(num_bytes),
    )


def meta_of_brackets(num_bytes: int) -> bytes:
    return frame(FrameHeader(meta_json='{"a":[' + "[]," * (num_bytes // 3)))


def meta_of_text(num_bytes: int) -> bytes:
    return frame(FrameHeader(meta_json='{"a":"' + "x" * num_bytes + '"}'))


# ---------------------------------------------------------------------------------- non-tensor columns


def arrow(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def record(arrays: Iterable[pa.Array], encoding: str) -> pa.RecordBatch:
    arrays = list(arrays)
    fields = [pa.field(f"c{i}", array.type, metadata={"encoding": encoding}) for i, array in enumerate(arrays)]
    return pa.record_batch(arrays, schema=pa.schema(fields))


def with_columns(batch: pa.RecordBatch) -> bytes:
    data = arrow(batch)
    header = FrameHeader(num_rows=batch.num_rows, meta_json="{}", region_bytes=len(data))
    header.columns.num_bytes = len(data)
    return frame(header, data)


def texts(cells: list[bytes], encoding: str = "object") -> bytes:
    return with_columns(record([pa.array(cells, pa.large_binary()).view(pa.large_string())], encoding))


def many_columns(num_bytes: int) -> bytes:
    one = pa.array([1])
    return with_columns(record([one] * (num_bytes // 330), "array"))


def booleans(num_bytes: int) -> bytes:
    """56 million where the message has 7 MiB."""
    bits = pa.py_buffer(bytes(num_bytes))
    return with_columns(record([pa.Array.from_buffers(pa.bool_(), 8 * num_bytes, [None, bits])], "object"))


def empty_texts(num_bytes: int) -> bytes:
    rows = num_bytes // 8 - 1
    offsets = pa.py_buffer(bytes(8 * (rows + 1)))
    data = pa.py_buffer(b"")
    array = pa.Array.from_buffers(pa.large_string(), rows, [None, offsets, data])
    return with_columns(record([array], "object"))


def one_cell_of_brackets(num_bytes: int) -> bytes:
    return texts([filled(b"[],", num_bytes)], "json")


def cells_of_brackets(num_bytes: int) -> bytes:
    cell = b"[" + b"[]," * 33_000 + b"[]]"
    return texts([cell] * (num_bytes // len(cell)), "json")


def cells_of_brackets_within_the_limit(num_bytes: int) -> bytes:
    """As many values as are read, and one text that is no JSON at the end."""
    cell = b"[" + b"[0]," * 29_000 + b"[]]"
    rest = num_bytes - 32 * len(cell)
    return texts([*[cell] * 32, *[b'"' + b"x" * (rest // 8) + b'"'] * 8, b"["], "json")


def short_cells_under_a_long_name(num_bytes: int) -> bytes:
    """A megabyte: what it costs are its cells, and an error's text that were made for each of them."""
    cells = pa.array([b"0"] * (num_bytes // 570), pa.large_binary()).view(pa.large_string())
    name = "\x01" * 1000
    field = pa.field(name, cells.type, metadata={"encoding": "json"})
    return with_columns(pa.record_batch([cells], schema=pa.schema([field])))


def escapes(num_bytes: int) -> bytes:
    cell = b'"' + b"\\n" * (2 * MIB) + b'"'
    return texts([*[cell] * (num_bytes // len(cell)), b"["], "json")


def long_numbers(num_bytes: int) -> bytes:
    cell = b"0." + b"1" * (4 * MIB)
    return texts([*[cell] * (num_bytes // len(cell)), b"["], "json")


def large_cell(num_bytes: int) -> bytes:
    return texts([b"x" * num_bytes])


def other_columns(num_bytes: int) -> bytes:
    """A batch, of columns that no method takes."""
    return texts([b"x" * (8 * MIB)] * (num_bytes // (8 * MIB)))


# ------------------------------------------------------------------------------------------- tensors


def masks_that_overlap(num_bytes: int) -> bytes:
    """Many columns that share spans which leave the row in the last one."""
    rows = num_bytes // 8
    header = FrameHeader(num_rows=rows, meta_json="{}", region_bytes=8 * rows)
    header.spans.add(num_bytes=8 * rows)
    for i in range(200):
        header.tensors.add(
            name=f"m{i}",
            dtype=data_pb2.DTYPE_BOOL,
            wire_dtype=data_pb2.DTYPE_BOOL,
            shape=[rows, 9],
            layout=data_pb2.LAYOUT_MASK,
        )
    starts = np.zeros(2 * rows, "<i4")
    starts[-1] = 10
    return frame(header, starts.tobytes())


def padding(num_bytes: int) -> bytes:
    """Unpacks to more than the region allows."""
    header = FrameHeader(num_rows=1, meta_json="{}", region_bytes=num_bytes)
    header.tensors.add(
        name="c",
        dtype=data_pb2.DTYPE_UINT8,
        wire_dtype=data_pb2.DTYPE_UINT8,
        shape=[1, 60 << 30],
        layout=data_pb2.LAYOUT_CONSTANT,
        fill=b"\1",
    )
    return frame(header, bytes(num_bytes))


ONE_MESSAGE: dict[str, Callable[[int], bytes]] = {
    made.__name__.replace("_", " "): made
    for made in (
        unknown_fields, one_unknown_field, tensor_specs, spans, fields_of_a_header, one_shape, long_name,
        many_axes, rows_without_end, half_a_region, meta_of_brackets, meta_of_text, many_columns, booleans,
        empty_texts, one_cell_of_brackets, cells_of_brackets, cells_of_brackets_within_the_limit,
        short_cells_under_a_long_name, escapes,
        long_numbers, large_cell, other_columns, masks_that_overlap, padding,
    )
}  # fmt: skip


def tiny_frames(number: int) -> Iterator[bytes]:
    """A region byte by byte, which never ends."""
    yield frame(FrameHeader(num_rows=1, meta_json="{}", region_bytes=1 << 30, columns={"num_bytes": 64}))
    one = join_frame(None, [b"x"], 1)
    for _ in range(number):
        yield one
