"""The columns of a batch: which cells and tensors they hold, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch


def test_from_single_dict_sorts_columns_by_kind():
    batch = DataProto.from_single_dict({"a": torch.zeros(2, 3), "b": ["x", "y"], "c": [1, 2]}, {"step": 1})
    assert list(batch.tensors) == ["a"]
    assert list(batch.non_tensors) == ["b", "c"]
    assert batch["c"].dtype == np.int64
    assert batch.meta_info == {"step": 1}


def test_columns_of_unequal_length_are_refused():
    with pytest.raises(InvalidBatch, match="same number of rows"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"b": ["x"]})


def test_a_tensor_without_an_axis_is_refused():
    with pytest.raises(InvalidBatch, match="axis 0"):
        DataProto.from_dict({"a": torch.tensor(1.0)})


def test_one_name_for_two_columns_is_refused():
    with pytest.raises(InvalidBatch, match="both"):
        DataProto.from_dict({"a": torch.zeros(1)}, {"a": ["x"]})


@pytest.mark.parametrize(
    ("cells", "dtype"),
    [
        ([1, 2], np.int64),
        ([1.5, 2.5], np.float64),
        ([True, False], np.bool_),
        ([1, 2.5], object),
        ([True, 2], object),
        ([2**63, -1], object),  # numpy would round them to floats
        (["x", "y"], object),
        ([[1, 2], [3, 4]], object),
        ([{"k": 1}, None], object),
        (np.array(["x", "yy"]), object),
        (np.array([1, 2], dtype=np.int8), np.int8),
    ],
)
def test_a_column_keeps_its_cells_as_they_are(cells: object, dtype: type):
    column = DataProto.from_dict(non_tensors={"c": cells})["c"]
    assert column.dtype == dtype
    assert column.shape == (2,)
    assert column.tolist() == list(cells)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "f2", "f4", "f8"])
def test_an_array_of_several_axes_keeps_its_dtype_and_shape(dtype: str):
    """Through every operation on a batch."""
    cells = np.arange(12).reshape(4, 3).astype(dtype)
    batch = DataProto.from_dict(non_tensors={"c": cells})
    for changed, rows in (
        (batch, [0, 1, 2, 3]),
        (batch[1:3], [1, 2]),
        (batch[[3, 0]], [3, 0]),
        (batch.repeat(2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (DataProto.concat(batch.chunk(2)), [0, 1, 2, 3]),
        (batch.union(DataProto.from_dict(non_tensors={"c": cells.copy()})), [0, 1, 2, 3]),
        (batch.select(deepcopy=True), [0, 1, 2, 3]),
    ):
        assert changed["c"].dtype == cells.dtype
        assert np.array_equal(changed["c"], cells[rows])
    other = DataProto.from_dict(non_tensors={"c": cells[:, :2]})
    with pytest.raises(InvalidBatch, match="trailing shape"):
        DataProto.concat([batch, other])


@pytest.mark.parametrize(
    ("tensor", "hint"),
    [
        (torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)]), "to_padded_tensor"),
        (
            torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            "to_padded_tensor",
        ),
        (torch.zeros(2, 2).to_sparse(), "sparse_coo"),
    ],
)
def test_nested_and_sparse_tensors_are_refused_as_columns(tensor: torch.Tensor, hint: str):
    with pytest.raises(InvalidBatch, match=f"column 'ragged'.*{hint}"):
        DataProto.from_dict({"ragged": tensor})
    batch = DataProto.from_dict({"a": torch.zeros(2)})
    with pytest.raises(InvalidBatch, match=hint):
        batch["ragged"] = tensor
