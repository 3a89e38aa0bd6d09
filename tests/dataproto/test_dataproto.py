"""DataProto: every operation, by hand-written examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolemesh.dataproto import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from rolemesh.errors import InvalidBatch
from rolemesh.wire.codec import load_batch, save_batch


def letters(text: str = "abcd", **meta: object) -> DataProto:
    """Rows named by letters, with a number for each."""
    numbers = torch.tensor([ord(letter) - ord("a") for letter in text], dtype=torch.int64)
    return DataProto.from_dict({"number": numbers}, {"letter": list(text)}, meta)


def text(batch: DataProto) -> str:
    """The rows' letters; both kinds of column must have moved together."""
    assert [chr(ord("a") + n) for n in batch["number"].tolist()] == batch["letter"].tolist()
    return "".join(batch["letter"])


# ------------------------------------------------------------------------------------ making


def test_columns_are_read_by_name_tensors_first():
    batch = letters(step=3)
    assert batch.columns == ["number", "letter"]
    assert batch["number"].tolist() == [0, 1, 2, 3]
    assert batch["letter"].dtype == object
    assert len(batch) == 4
    assert "letter" in batch
    assert "values" not in batch
    with pytest.raises(InvalidBatch, match=r"no column 'values'.*letter.*number"):
        batch["values"]


def test_a_batch_without_columns_keeps_its_number_of_rows():
    assert len(DataProto()) == 0
    empty = letters("abcd", step=1).select([], [])
    assert (len(empty), empty.columns, empty.meta_info) == (4, [], {"step": 1})
    popped = letters("abcd")
    popped.pop(["number"], ["letter"])
    for batch in (empty, popped, DataProto(num_rows=4)):
        assert len(batch) == 4
        assert [len(part) for part in batch.split(3)] == [3, 1]
        assert [len(part) for part in batch.chunk(2)] == [2, 2]
        assert len(batch.repeat(3)) == 12
        assert len(batch[[True, False, True, False]]) == 2
        assert len(batch[-1]) == 1
        assert len(DataProto.concat([batch, DataProto(num_rows=2)])) == 6
        assert text(batch.union(letters("abcd"))) == "abcd"
        assert text(letters("abcd").union(batch)) == "abcd"
        with pytest.raises(InvalidBatch, match="same number of rows"):
            batch.union(letters("abc"))
        with pytest.raises(InvalidBatch, match="same number of rows"):
            batch["values"] = torch.zeros(3)
    with pytest.raises(InvalidBatch, match="same number of rows"):
        DataProto({"a": torch.zeros(2)}, num_rows=3)
    assert text(DataProto().union(letters("ab"))) == "ab"  # nothing said how many rows it has


@pytest.mark.parametrize("num_rows", [-1, True, False, 4.0, "4", np.int64(4)])
def test_a_number_of_rows_is_a_count(num_rows: Any):
    for columns in ({}, {"a": torch.zeros(4)}, {"a": torch.zeros(1)}):
        with pytest.raises(InvalidBatch, match=r"num_rows is .*; expected an int of 0 or more"):
            DataProto(columns, num_rows=num_rows)
    assert len(DataProto(num_rows=0)) == 0


def test_assignment_sets_a_column_of_the_right_length():
    batch = letters()
    batch["values"] = torch.ones(4, 2)
    batch["letter"] = ["w", "x", "y", "z"]
    batch["number"] = ["now", "not", "a", "tensor"]
    assert batch.columns == ["values", "letter", "number"]
    with pytest.raises(InvalidBatch, match="same number of rows"):
        batch["values"] = torch.ones(3)
    assert batch["values"].shape == (4, 2)


# --------------------------------------------------------------------------------- selecting


def test_indexing_by_int_slice_list_mask_and_array():
    batch = letters("abcd", step=1)
    assert text(batch[1]) == "b"
    assert text(batch[-1]) == "d"
    assert text(batch[1:3]) == "bc"
    assert text(batch[::2]) == "ac"
    assert text(batch[[3, 0, 3]]) == "dad"
    assert text(batch[[-1, 1]]) == "db"
    assert text(batch[[True, False, False, True]]) == "ad"
    assert text(batch[torch.tensor([False, True, True, False])]) == "bc"
    assert text(batch[np.array([2, 1])]) == "cb"
    assert text(batch[[]]) == ""
    assert batch[1:3].meta_info == {"step": 1}
    with pytest.raises(IndexError):
        batch[4]
    for outside in ([4], [0, -5]):
        with pytest.raises(IndexError, match="of a batch of 4"):
            batch[outside]
    with pytest.raises(InvalidBatch, match="mask"):
        batch[[True, False]]
    with pytest.raises(InvalidBatch, match="positions"):
        batch[[0.5]]


def test_select_takes_named_columns_and_all_of_a_kind_for_none():
    batch = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)}, {"c": ["x"]}, {"step": 1, "lr": 2})
    chosen = batch.select(batch_keys=["b"], meta_info_keys=["lr"])
    assert chosen.columns == ["b", "c"]
    assert chosen.meta_info == {"lr": 2}
    assert chosen["b"] is batch["b"]
    assert batch.select([], [], []).columns == []
    assert batch.select_columns(["c", "a"]).columns == ["a", "c"]
    with pytest.raises(InvalidBatch, match="'z'"):
        batch.select(batch_keys=["z"])
    with pytest.raises(InvalidBatch, match="'z'"):
        batch.select_columns(["z"])


def test_a_deep_copy_shares_nothing():
    batch = DataProto.from_dict({"a": torch.zeros(1)}, {"c": [{"k": [1]}]}, {"m": [1]})
    copied = batch.select(deepcopy=True)
    copied["a"][0] = 5
    copied["c"][0]["k"].append(2)
    copied.meta_info["m"].append(2)
    assert batch["a"].tolist() == [0]
    assert batch["c"].tolist() == [{"k": [1]}]
    assert batch.meta_info == {"m": [1]}


def test_pop_moves_columns_into_another_batch():
    batch = letters("ab", step=1)
    taken = batch.pop(["number"], meta_info_keys=["step"])
    assert taken.columns == ["number"]
    assert taken.meta_info == {"step": 1}
    assert batch.columns == ["letter"]
    assert batch.meta_info == {}
    with pytest.raises(InvalidBatch):
        batch.pop(["number"])


def test_pop_leaves_the_dict_that_a_batch_was_made_of():
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1)}
    assert DataProto(tensors).pop(["a"]).columns == ["a"]
    assert list(tensors) == ["a", "b"]


def test_rename_by_name_by_lists_and_by_keywords():
    batch = letters("ab")
    assert batch.rename("number", "n").columns == ["n", "letter"]
    assert batch.rename(["number", "letter"], ["n", "l"]).columns == ["n", "l"]
    assert batch.rename(number="letter", letter="number").columns == ["letter", "number"]
    with pytest.raises(InvalidBatch, match="one name"):
        batch.rename(number="letter")
    with pytest.raises(InvalidBatch, match="values"):
        batch.rename(values="v")
    with pytest.raises(InvalidBatch, match="2 columns to 1"):
        batch.rename(["number", "letter"], ["n"])


# --------------------------------------------------------------------------------- splitting


def test_chunk_gives_equal_parts_and_refuses_to_divide_unevenly():
    assert [text(part) for part in letters("abcdef").chunk(3)] == ["ab", "cd", "ef"]
    with pytest.raises(InvalidBatch, match="4 rows do not divide into 3"):
        letters("abcd").chunk(3)
    assert [len(part) for part in letters("").chunk(2)] == [0, 0]


def test_split_gives_parts_of_a_size_and_a_shorter_last():
    assert [text(part) for part in letters("abcde").split(2)] == ["ab", "cd", "e"]
    assert DataProto.concat(letters("abcde").split(2))["letter"].tolist() == list("abcde")
    with pytest.raises(InvalidBatch):
        letters().split(0)


def test_make_iterator_goes_through_the_rows_once_an_epoch():
    assert [text(part) for part in letters("abcd").make_iterator(2, epochs=2)] == ["ab", "cd", "ab", "cd"]
    with pytest.raises(InvalidBatch, match="mini-batches of 3"):
        list(letters("abcd").make_iterator(3, epochs=1))


def test_make_iterator_shuffles_if_asked_and_repeats_with_a_seed():
    word = "abcdefgh"

    def parts(seed: int, **dataloader_kwargs: bool) -> list[str]:
        batches = letters(word).make_iterator(4, 2, seed=seed, dataloader_kwargs=dataloader_kwargs)
        return [text(part) for part in batches]

    assert parts(7) == parts(7, shuffle=False) == ["abcd", "efgh"] * 2
    first, again, other = parts(7, shuffle=True), parts(7, shuffle=True), parts(8, shuffle=True)
    with pytest.raises(InvalidBatch, match="num_workers"):
        parts(7, num_workers=True)
    assert first == again != other
    for epoch in (first[:2], first[2:]):
        assert sorted("".join(epoch)) == list(word)
    assert first[:2] != first[2:]
    assert "".join(first[:2]) != word


# ------------------------------------------------------------------------------- rearranging


def test_repeat_interleaves_or_tiles():
    assert text(letters("ab").repeat(3)) == "aaabbb"
    assert text(letters("ab").repeat(3, interleave=False)) == "ababab"
    assert text(letters("ab").repeat(0)) == ""


def test_sample_level_repeat_counts_by_row():
    assert text(letters("abc").sample_level_repeat([2, 0, 1])) == "aac"
    assert text(letters("abc").sample_level_repeat(torch.tensor([1, 1, 2]))) == "abcc"
    with pytest.raises(InvalidBatch, match="2 repeat counts for 3"):
        letters("abc").sample_level_repeat([1, 2])


def test_reorder_is_in_place_and_wants_a_permutation():
    batch = letters("abcd")
    batch.reorder(torch.tensor([3, 1, 0, 2]))
    assert text(batch) == "dbac"
    for wrong in ([0, 1, 2], [0, 0, 1, 2], [0, 1, 2, 4]):
        with pytest.raises(InvalidBatch, match="permutation"):
            batch.reorder(wrong)


def test_padding_repeats_rows_from_the_start_and_comes_off_again():
    padded, pad_size = pad_dataproto_to_divisor(letters("abcde"), 4)
    assert (text(padded), pad_size) == ("abcdeabc", 3)
    assert text(unpad_dataproto(padded, pad_size)) == "abcde"
    same, none = pad_dataproto_to_divisor(letters("abcd"), 4)
    assert (text(same), none) == ("abcd", 0)
    assert text(unpad_dataproto(same, none)) == "abcd"
    assert text(pad_dataproto_to_divisor(letters("ab"), 5)[0]) == "ababa"
    with pytest.raises(InvalidBatch):
        pad_dataproto_to_divisor(letters(""), 4)


def test_to_moves_tensors_to_a_device():
    assert letters().to("meta")["number"].device.type == "meta"


# -------------------------------------------------------------------------------------- disk


def test_a_batch_comes_back_from_disk(tmp_path: Path):
    batch = DataProto.from_dict(
        {"values": torch.tensor([[1.5, float("nan")], [-0.0, 2.0]], dtype=torch.bfloat16)},
        {"chat": [[{"role": "user", "content": "2+2?"}], []], "uid": ["ü", "v"]},
        {"step": 3, "sampling": "train"},
    )
    save_batch(batch, tmp_path / "batch.bin")
    back = load_batch(tmp_path / "batch.bin")
    assert torch.equal(back["values"].view(torch.int16), batch["values"].view(torch.int16))
    assert back["chat"].tolist() == batch["chat"].tolist()
    assert back["uid"].tolist() == ["ü", "v"]
    assert back.meta_info == batch.meta_info
    assert [path.name for path in tmp_path.iterdir()] == ["batch.bin"]


def test_a_failed_save_keeps_the_file_and_a_cut_file_is_refused(tmp_path: Path):
    path = tmp_path / "batch.bin"
    save_batch(letters("ab"), path)
    with pytest.raises(InvalidBatch, match="set"):
        save_batch(DataProto.from_dict(non_tensors={"c": [{1, 2}, None]}), path)
    assert text(load_batch(path)) == "ab"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidBatch):
        load_batch(path)


# -------------------------------------------------------------------------------- tensordict


def assert_same(batch: DataProto, other: DataProto) -> None:
    assert len(batch) == len(other)
    assert batch.meta_info == other.meta_info
    assert batch.columns == other.columns
    batch.union(other)  # refuses columns that differ in a bit
    assert [batch[name].dtype for name in batch.columns] == [other[name].dtype for name in other.columns]


def test_a_tensordict_round_trip_keeps_tensors_cells_and_meta():
    batch = DataProto.from_dict(
        {"obs": torch.arange(6).reshape(3, 2), "half": torch.ones(3, dtype=torch.bfloat16)},
        {
            "label": ["a", "b", "c"],
            "info": [{"k": [1]}, None, {"k": []}],
            "count": np.array([1, 2, 3], dtype=np.int32),
            "box": np.arange(6, dtype=np.float32).reshape(3, 2),
        },
        {"name": "x", "nested": {"a": [1, 2]}},
    )
    made = batch.to_tensordict()
    assert made.batch_size == torch.Size([3])
    assert made["obs"].data_ptr() == batch["obs"].data_ptr()  # shared, not copied
    assert made["label"] == ["a", "b", "c"]
    assert made["name"] == "x"
    assert_same(DataProto.from_tensordict(made), batch)
    assert_same(DataProto.from_tensordict(made[1:]), batch[1:])


def test_a_nested_or_multi_axis_tensordict_is_refused():
    tensordict = pytest.importorskip("tensordict")
    with pytest.raises(InvalidBatch, match="one batch axis"):
        DataProto.from_tensordict(tensordict.TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3]))
    within = tensordict.TensorDict({"a": {"b": torch.zeros(2)}}, batch_size=[2])
    with pytest.raises(InvalidBatch, match="flatten_keys"):
        DataProto.from_tensordict(within)
    assert len(DataProto.from_tensordict(tensordict.TensorDict({}, batch_size=[5]))) == 5
    with pytest.raises(InvalidBatch, match="'number'"):
        letters("ab", number=1).to_tensordict()


def test_print_size_says_what_the_columns_take(capsys: pytest.CaptureFixture[str]):
    batch = DataProto.from_dict({"a": torch.zeros(2**18, 2)}, {"b": np.zeros(2**18, dtype=np.int32)})
    batch.print_size("rollout")
    assert capsys.readouterr().out == "rollout, tensors: 0.001953 GiB, non-tensor columns: 0.000977 GiB\n"
