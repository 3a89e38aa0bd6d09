"""Files that every rank writes and reads a part of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rolemesh.errors import ModelNotFound
from rolemesh.ranks.ranks import Ranks
from rolemesh.ranks.sharded_files import TensorFiles, copied, write_rows


def test_one_rank_writes_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "b.ä": torch.arange(6.0).view(2, 3),
        "a": torch.ones(3, dtype=torch.int64),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
    }
    for metadata in (None, {"format": "pt"}):
        save_file(tensors, tmp_path / "theirs", metadata)
        write_rows(tmp_path / "ours", copied(tensors, Ranks.alone()), Ranks.alone(), metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    files = TensorFiles([tmp_path / "ours"])
    assert all(torch.equal(files.rows(name, tensor), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("index", ["[" * 50_000, "[]", '{"weight_map": 1}', "{"])
def test_an_index_that_is_damaged_in_any_way_is_named(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelNotFound, match=r"model\.safetensors\.index\.json cannot be read"):
        TensorFiles.of_model(tmp_path)


def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(ModelNotFound, match=r"names '../a.safetensors', which is not a file beside it"):
        TensorFiles.of_model(tmp_path)
