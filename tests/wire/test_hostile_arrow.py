"""Non-tensor columns that `to_arrow` would not write are refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hostile_batches import (
    BAD_ARROW,
    TEXTS,
    arrow,
    record,
    with_columns,
)

from rolemesh.errors import InvalidBatch
from rolemesh.wire.codec import load


def test_multi_axis_cells_are_read_from_the_first_ones_offset():
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
def test_bad_cells_of_several_axes_are_named(case: str, message: str):
    with pytest.raises(InvalidBatch, match=message):
        load(with_columns(BAD_ARROW[case]))


def test_valid_arrow_is_read():
    assert load(with_columns(arrow([record(TEXTS)])))["c"].tolist() == ["x", "y"]


@pytest.mark.parametrize("case", BAD_ARROW)
def test_arrow_that_to_arrow_does_not_write_is_refused(case: str):
    with pytest.raises(InvalidBatch):
        load(with_columns(BAD_ARROW[case]))
