"""The codec with columns that are no tensors, with metadata, and with any batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_batches import DTYPES, assert_same

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.wire.arrow_columns import SLICE
from rolemesh.wire.codec import dump, load


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", ">i4"]
)
def test_numpy_columns_keep_their_dtype_and_bits(dtype: str):
    raw = np.random.default_rng(0).integers(
        0, 2 if dtype == "?" else 256, 5 * np.dtype(dtype).itemsize, np.uint8
    )
    column = raw.view(dtype)
    back = load(dump(DataProto.from_dict(non_tensors={"c": column})))["c"]
    assert back.dtype == column.dtype.newbyteorder("=")
    assert back.tobytes() == column.astype(back.dtype).tobytes()
    back[0] = 1  # writable


@pytest.mark.parametrize(
    "cells",
    [
        ["a", "", "ü€😀"],
        ["a", None],
        [None, None],
        [b"\x00\xff", b""],
        [1, None, -(2**63)],
        [2**64, 1],  # beyond 64 bits
        [1.5, float("nan"), None, -0.0, float("inf")],
        [True, None, False],
        [True, 1, 1.0, "1", None],
        ["\ud800", "lone surrogate"],
        [[], [1, [2, {"k": None}]], {"a": {"b": [1.5, True, float("nan")]}}],
        [[1, 2], [3, 4]],
        [{"role": "user", "content": "\ud800 \x00 \u2028"}, {}],
    ],
)
def test_object_columns_come_back_equal_with_their_types(cells: list[Any]):
    column = np.fromiter(cells, dtype=object, count=len(cells))
    batch = DataProto.from_dict(non_tensors={"c": column})
    assert_same(load(dump(batch)), batch)


class Text(str):
    """A subclass, which would come back as another type."""


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({1, 2}, r"column 'c', row 1, holds a builtins\.set"),
        ((1, 2), r"row 1, holds a builtins\.tuple"),
        ({"k": [object()]}, r"row 1, holds a builtins\.object"),
        ({1: "x"}, r"row 1, has the key 1 \(int\)"),
        (np.float32(1), r"row 1, holds a numpy\.float32"),
        ([np.int64(1)], r"row 1, holds a numpy\.int64"),
        (torch.zeros(1), r"row 1, holds a torch\.Tensor"),
        ([b"x"], r"row 1, holds a builtins\.bytes"),
        (Text("x"), r"row 1, holds a .*Text"),
        (10**5000, r"row 1, cannot be sent"),
    ],
    ids=[
        "set",
        "tuple",
        "object",
        "int key",
        "np.float32",
        "np.int64",
        "Tensor",
        "bytes",
        "subclass",
        "10**5000",
    ],
)
def test_a_cell_not_in_json_error_names_column_row_and_type(cell: Any, message: str):
    column = np.fromiter(["fine", cell], dtype=object, count=2)
    with pytest.raises(InvalidBatch, match=message):
        dump(DataProto.from_dict(non_tensors={"c": column}))


def test_more_cells_than_are_made_at_once_come_back():
    numbers = [None if i % 5 == 0 else i for i in range(2 * SLICE + 3)]
    columns = {
        "number": numbers,
        "text": [None if n is None else str(n) for n in numbers],
        "json": [{"n": n} for n in numbers],
        "fraction": [None if n is None else n / 2 for n in numbers],
    }
    batch = DataProto({}, columns)
    assert_same(load(dump(batch)), batch)


def test_cells_nested_too_deep_are_refused_before_the_stack_ends():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidBatch, match="nests deeper than 64"):
        dump(DataProto.from_dict(non_tensors={"c": np.fromiter([deep], dtype=object, count=1)}))
    while deep:  # taken apart by hand: the interpreter would recurse
        deep = deep.pop()


@pytest.mark.parametrize("meta", [{"s": {1}}, {1: 2}, {"t": (1,)}, {"x": torch.zeros(1)}, {"n": np.float64(1)}])
def test_meta_that_is_not_json_like_is_refused(meta: dict[Any, Any]):
    with pytest.raises(InvalidBatch, match="meta_info"):
        dump(DataProto(meta_info=meta))


def test_names_that_are_not_unicode_are_refused():
    with pytest.raises(InvalidBatch):
        dump(DataProto({"\ud800": torch.zeros(1)}))
    with pytest.raises(InvalidBatch):
        dump(DataProto.from_dict(non_tensors={"\ud800": [1]}))


def test_a_header_too_large_for_a_frame_is_refused():
    with pytest.raises(InvalidBatch, match="make large meta_info a column"):
        dump(DataProto(meta_info={"x": "y" * (33 << 20)}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)


@st.composite
def tensors(draw: st.DrawFn, rows: int) -> torch.Tensor:
    """Raw bits, or what a step is made of: runs, masks, positions, padded rows; contiguous or not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = (rows, *draw(st.lists(st.integers(0, 12), max_size=3)))
    kind = draw(st.sampled_from(["bits", "constant", "padded", "mask", "small"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    high = 2 if dtype == torch.bool else 256
    size = (math.prod(shape) * dtype.itemsize,)
    bits = torch.randint(0, high, size, dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    if kind == "constant" and bits.numel():
        bits = bits.reshape(-1)[:1].expand(bits.numel()).reshape(shape).clone()
    if kind == "small":
        bits = torch.randint(0, 2, shape, generator=generator).to(dtype)
    if kind in ("padded", "mask") and len(shape) > 1:
        ends = torch.randint(0, shape[-1] + 1, (*shape[:-1], 2), generator=generator).sort(dim=-1).values
        at = torch.arange(shape[-1])
        inside = (at >= ends[..., :1]) & (at < ends[..., 1:])
        bits = inside.to(dtype) if kind == "mask" else padded(bits, inside)
    return bits.transpose(0, -1).contiguous().transpose(0, -1) if draw(st.booleans()) else bits


def padded(bits: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """By bytes, since not every dtype can be indexed."""
    view = bits.reshape(-1).view(torch.uint8).reshape(*bits.shape, bits.dtype.itemsize).clone()
    view[~inside] = 0
    return view.reshape(-1).view(bits.dtype).reshape(bits.shape)


@st.composite
def batches(draw: st.DrawFn) -> DataProto:
    rows = draw(st.integers(0, 8))
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    split = draw(st.integers(0, len(names)))
    typed = [st.text(), st.binary(), st.integers(), st.floats(), st.booleans(), JSON]
    columns = {}
    for name in names[split:]:
        cells = st.lists(draw(st.sampled_from(typed)) | st.none(), min_size=rows, max_size=rows)
        columns[name] = np.fromiter(draw(cells), dtype=object, count=rows)
    return DataProto(
        {name: draw(tensors(rows)) for name in names[:split]},
        columns,
        draw(st.dictionaries(st.text(), JSON, max_size=3)),
    )


@settings(max_examples=300, deadline=None)
@given(batches())
def test_any_batch_survives_the_wire_exactly(batch: DataProto):
    assert_same(load(dump(batch)), batch)
