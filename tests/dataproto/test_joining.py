"""Union and concat: batches of the same rows, and of further rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch


def letters(text: str = "abcd", **meta: object) -> DataProto:
    """Rows named by letters, with a number for each."""
    numbers = torch.tensor([ord(letter) - ord("a") for letter in text], dtype=torch.int64)
    return DataProto.from_dict({"number": numbers}, {"letter": list(text)}, meta)


def text(batch: DataProto) -> str:
    """The rows' letters; both kinds of column must have moved together."""
    assert [chr(ord("a") + n) for n in batch["number"].tolist()] == batch["letter"].tolist()
    return "".join(batch["letter"])


def test_union_merges_equal_duplicates():
    left = DataProto.from_dict({"a": torch.tensor([1.0, float("nan")])}, {"u": ["x", "y"]}, {"step": 1})
    right = DataProto.from_dict(
        {"a": torch.tensor([1.0, float("nan")]), "b": torch.zeros(2)}, {"u": ["x", "y"]}, {"step": 1, "lr": 2}
    )
    both = left.union(right)
    assert both.columns == ["a", "b", "u"]
    assert both.meta_info == {"step": 1, "lr": 2}
    assert left.columns == ["a", "u"]


def test_union_merges_nan_cells_array_cells_and_tensor_meta():
    def batch(last: float = 2.0) -> DataProto:
        cells = [{"x": float("nan"), "y": [np.array([1.0, last])]}, None]
        return DataProto.from_dict(non_tensors={"c": cells}, meta_info={"t": torch.tensor([1.0, float("nan")])})

    assert batch().union(batch()).columns == ["c"]
    assert len(DataProto.concat([batch(), batch()])) == 4
    with pytest.raises(InvalidBatch, match="'c'"):
        batch().union(batch(last=3.0))


@pytest.mark.parametrize(
    "other",
    [
        DataProto.from_dict({"number": torch.tensor([0, 2])}),
        DataProto.from_dict({"number": torch.tensor([0, 1], dtype=torch.int32)}),
        DataProto.from_dict({"number": torch.tensor([[0], [1]])}),
        DataProto.from_dict(non_tensors={"letter": ["a", "x"]}),
        DataProto.from_dict({"values": torch.zeros(3)}),
        DataProto.from_dict(meta_info={"step": 2}),
    ],
)
def test_union_of_unequal_duplicates_is_an_error(other: DataProto):
    with pytest.raises(InvalidBatch):
        letters("ab", step=1).union(other)


def test_union_refuses_cells_that_contain_themselves():
    def circle() -> DataProto:
        cell: list[object] = []
        cell.append(cell)
        return DataProto.from_dict(non_tensors={"a": [cell]})

    with pytest.raises(InvalidBatch, match="contains itself"):
        circle().union(circle())


def test_union_keeps_the_columns_of_every_batch_in_order():
    others = [DataProto.from_dict({name: torch.zeros(2)}) for name in "xy"]
    assert letters("ab").union(*others).columns == ["number", "x", "y", "letter"]


def test_concat_joins_rows_and_meta():
    joined = DataProto.concat([letters("ab", step=1), letters("c", step=1, lr=2), letters("")])
    assert text(joined) == "abc"
    assert joined.meta_info == {"step": 1, "lr": 2}


def test_concat_gathers_metrics_by_name_in_batch_order():
    parts = [
        letters("a", step=1, metrics={"loss": 1.0, "lr": 0.1}),
        letters("b", step=1, metrics=[{"loss": 2.0}, {"loss": 3.0}]),
        letters("c", step=1),
        letters("d", step=1, metrics=None),
    ]
    assert DataProto.concat(parts).meta_info == {"step": 1, "metrics": {"loss": [1.0, 2.0, 3.0], "lr": [0.1]}}
    with pytest.raises(InvalidBatch, match="metrics"):
        DataProto.concat([letters("a", metrics=3.0)])


def test_concat_refuses_what_does_not_fit():
    a = DataProto.from_dict({"x": torch.zeros(1, 2)})
    for other in (
        DataProto.from_dict({"y": torch.zeros(1, 2)}),
        DataProto.from_dict({"x": torch.zeros(1, 3)}),
        DataProto.from_dict({"x": torch.zeros(1, 2, dtype=torch.float64)}),
        DataProto.from_dict(non_tensors={"x": ["z"]}),
    ):
        with pytest.raises(InvalidBatch, match="concat"):
            DataProto.concat([a, other])
    with pytest.raises(InvalidBatch, match="here"):
        DataProto.concat([letters("a", step=1), letters("b", step=2)])
    with pytest.raises(InvalidBatch):
        DataProto.concat([])


def test_concat_rounds_no_number_to_fit_another():
    big = 2**53 + 1
    joined = DataProto.concat(
        [DataProto.from_dict(non_tensors={"n": [big]}), DataProto.from_dict(non_tensors={"n": [0.5]})]
    )
    assert joined["n"].tolist() == [big, 0.5]
