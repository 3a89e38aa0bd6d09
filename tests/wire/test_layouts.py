"""Layouts by hand: what is held, what is worth a span, and columns that come back from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.v1 import data_pb2
from rolemesh.wire.codec import dump, load
from rolemesh.wire.dtypes import Array
from rolemesh.wire.layouts import BLOCK, WIDE, Packed, Spans, pack, unpack


def spans(starts: list[int], lengths: list[int], width: int = 8) -> Spans:
    return Spans(ints(starts), ints(lengths), width)


def ints(values: list[int]) -> Array:
    array: Array = torch.tensor(values, dtype=torch.int32).numpy()
    return array


def packed(**tensors: Tensor) -> dict[str, Packed]:
    """As they are sent; each comes back as it was."""
    found = pack(tensors)
    for each in found:
        assert torch.equal(unpack(each), tensors[each.name]), each.name
    return {each.name: each for each in found}


def layout_of(tensor: Tensor) -> str:
    return data_pb2.Layout.Name(packed(x=tensor)["x"].layout).removeprefix("LAYOUT_")


def mask(starts: list[int], lengths: list[int], width: int) -> Tensor:
    at, first = torch.arange(width), torch.tensor(starts)[:, None]
    return (at >= first) & (at < first + torch.tensor(lengths)[:, None])


# ------------------------------------------------------------------------------------- spans


def test_spans_are_the_same_where_width_starts_and_lengths_are() -> None:
    one = spans([1, 2], [3, 4])
    assert one.same_as(spans([1, 2], [3, 4]))
    assert not one.same_as(spans([1, 2], [3, 5]))
    assert not one.same_as(spans([1, 3], [3, 4]))
    assert not one.same_as(spans([1, 2], [3, 4], width=9))


def test_spans_cover_others_that_lie_within_them() -> None:
    one = spans([1, 2], [3, 4])
    for within in ([1, 2], [3, 4]), ([2, 2], [2, 4]), ([1, 2], [2, 3]), ([0, 2], [0, 4]), ([0, 0], [0, 0]):
        assert one.covers(spans(*within)), within
    for beyond in ([0, 2], [4, 4]), ([1, 2], [4, 4]), ([1, 1], [3, 1]), ([0, 2], [1, 4]):
        assert not one.covers(spans(*beyond)), beyond
    assert not one.covers(spans([1], [3]))
    assert not one.covers(spans([1, 2], [3, 4], width=9))


def test_equal_masks_of_any_dtype_share_one_spans_object() -> None:
    """Other masks have their own."""
    one, lengths, starts = mask([1, 2], [3, 4], 16), mask([1, 2], [3, 5], 16), mask([1, 3], [3, 4], 16)
    found = packed(a=one, b=one.long(), c=lengths, d=starts)
    assert found["a"].spans is found["b"].spans
    assert len({id(each.spans) for each in found.values()}) == 3


def test_a_row_that_holds_nothing_starts_at_0() -> None:
    held = packed(m=mask([3, 0], [2, 0], 16))["m"].spans
    assert held is not None
    assert (held.starts.tolist(), held.lengths.tolist()) == ([3, 0], [2, 0])


# ------------------------------------------------------------------------- what is worth it


@pytest.mark.parametrize(("held", "layout"), [(48, "RAGGED"), (49, "DENSE")])
def test_spans_of_its_own_have_to_save_an_eighth_of_a_column(held: int, layout: str) -> None:
    """8 x 8 of 8 bytes: 512. 48 held take 384 and 64 for the spans, which is 7/8; one more is too much."""
    column = torch.arange(1, 65).reshape(8, 8)
    padded = [2] * 8 if held == 48 else [2] * 7 + [1]
    column = column.where(torch.arange(8) >= torch.tensor(padded)[:, None], 0)
    assert layout_of(column) == layout


@pytest.mark.parametrize(("held", "layout"), [(56, "RAGGED"), (57, "DENSE")])
def test_spans_of_a_mask_have_to_save_an_eighth_too(held: int, layout: str) -> None:
    lengths = [8] * 5 + [held - 52, 6, 6]
    shown = mask([0] * 8, lengths, 8)
    column = torch.arange(1.0, 65.0, dtype=torch.float64).reshape(8, 8).where(shown, 0)
    found = packed(mask=shown.double(), x=column)["x"]
    assert data_pb2.Layout.Name(found.layout) == f"LAYOUT_{layout}"


@pytest.mark.parametrize(("own", "shared"), [(18, True), (10, False)])
def test_a_column_takes_the_masks_spans_unless_its_own_are_less(own: int, shared: bool) -> None:
    """Of 4 bytes: 20 held by the nearer mask are 80 a row; 18 of its own and their span as many; 10 are 48."""
    wide, near = mask([0] * 4, [40] * 4, 64), mask([0] * 4, [20] * 4, 64)
    column = torch.arange(1.0, 4 * 64 + 1).reshape(4, 64).where(mask([1] * 4, [own] * 4, 64), 0.0)
    found = packed(wide=wide, near=near, x=column)
    assert (found["x"].spans is found["near"].spans) is shared
    values = found["x"].values
    assert values is not None
    assert values.size == 4 * (20 if shared else own)


def test_padding_is_what_stands_twice_at_the_edges_of_most_rows() -> None:
    """Elements that stand once at an edge are no padding, however often."""
    left = torch.tensor([[0, 0, 1, 2, 3], [0, 0, 4, 5, 6], [0, 0, 7, 8, 9]])
    assert layout_of(left) == layout_of(left.flip(1)) == "RAGGED"
    nines = torch.tensor([[0, 0, 0, 0, 9], [0, 0, 0, 0, 9], [1, 2, 3, 4, 9], [5, 6, 7, 8, 9]])
    assert layout_of(nines) == "RAGGED"
    once = torch.tensor([[0, 1, 2, 3, 4], [0, 5, 6, 7, 8]])
    assert layout_of(once) == "DENSE"


def test_a_single_row_is_packed_and_a_row_of_a_spans_size_is_not() -> None:
    assert layout_of(torch.tensor([[0, 0, 0, 0, 0, 5, 0, 0, 0, 0]])) == "RAGGED"
    assert layout_of(torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0, 0, 0]])) == "MASK"
    assert layout_of(mask([0, 2], [4, 2], 8)) == "DENSE"  # 8 bytes a row
    assert layout_of(mask([0, 2], [4, 2], 9)) == "MASK"


def test_two_equal_elements_are_a_constant_and_one_is_not() -> None:
    assert layout_of(torch.tensor([7.5, 7.5])) == "CONSTANT"
    assert layout_of(torch.tensor([7.5])) == "DENSE"
    assert layout_of(torch.tensor([7, 8, 8, 7, 7])) == "DENSE"


def test_integers_of_two_bytes_are_narrowed_too() -> None:
    assert packed(x=torch.tensor([0, 255, 3], dtype=torch.int16))["x"].wire_dtype == torch.uint8


# ------------------------------------------------------------------------------- coming back


@pytest.mark.parametrize("width", [WIDE - 1, WIDE, WIDE + 1])
def test_columns_of_many_blocks_come_back_whatever_their_width(width: int) -> None:
    """Rows of WIDE elements are put one by one, narrower ones together; more rows than are unpacked at once."""
    rows = 3 * (BLOCK // WIDE) + 5
    starts = [row % 7 for row in range(rows)]
    lengths = [row % (width // 2) for row in range(rows)]
    shown = mask(starts, lengths, width)
    ids = torch.arange(rows * width).reshape(rows, width) - 1000
    columns = {
        "mask": shown,
        "positions": (shown.long().cumsum(1) - 1).clamp(min=0),
        "ids": ids.where(shown, 151_643),
        "floats": ids.float().where(shown, 0.0),
    }
    assert [each.layout for each in packed(**columns).values()] == [
        data_pb2.LAYOUT_MASK,
        data_pb2.LAYOUT_POSITIONS,
        data_pb2.LAYOUT_RAGGED,
        data_pb2.LAYOUT_RAGGED,
    ]


def test_negative_integers_that_were_narrowed_come_back_negative() -> None:
    ids = torch.arange(-30, 34).reshape(2, 32).where(torch.arange(32) < 20, 2**40)
    found = packed(x=ids)["x"]
    assert (found.layout, found.wire_dtype) == (data_pb2.LAYOUT_RAGGED, torch.int32)
    assert torch.equal(load(dump(DataProto({"x": ids})))["x"], ids)


def test_positions_that_count_beyond_a_block_come_back() -> None:
    length = 2 * BLOCK + 3
    shown = mask([5, 0], [length, 0], length + 9)
    found = packed(mask=shown, positions=(shown.long().cumsum(1) - 1).clamp(min=0))
    assert found["positions"].layout == data_pb2.LAYOUT_POSITIONS


def test_positions_are_those_of_any_mask_before_them() -> None:
    one, other = mask([0, 4], [16, 0], 16), mask([3, 1], [9, 2], 16)
    found = packed(one=one, other=other, positions=(other.long().cumsum(1) - 1).clamp(min=0))
    assert found["positions"].layout == data_pb2.LAYOUT_POSITIONS
    assert found["positions"].spans is found["other"].spans


def test_positions_count_no_further_than_their_dtype_can() -> None:
    shown = mask([0, 0], [256, 2], 300)
    positions = (shown.long().cumsum(1) - 1).clamp(min=0).to(torch.uint8)
    found = packed(mask=shown, positions=positions)["positions"]
    assert found.layout == data_pb2.LAYOUT_POSITIONS
    found.spans = spans([0, 0], [257, 2], 300)
    with pytest.raises(InvalidBatch, match=r"'positions': torch.uint8 cannot count to 257"):
        unpack(found)
