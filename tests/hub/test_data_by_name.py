"""Data files of the Hub: hf://datasets/OWNER/NAME[@REVISION]/FILE, downloaded alone and pinned to a commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub_server import Hub, stop_asking
from in_process import write_data

from rolemesh.config import JobConfig
from rolemesh.config.data import DataConfig
from rolemesh.config.job import make_job
from rolemesh.data.row_source import load_rows
from rolemesh.errors import InvalidData
from rolemesh.models.fetching import fetched, pinned

SET = "Owner/Sums"


def job_of(model: Path, *files: str) -> JobConfig:
    return make_job({"actor": {"model": {"path": str(model)}}, "data": {"train_files": list(files)}}, "job")


def test_the_named_files_alone_are_fetched_and_pinned(
    hub: Hub, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = Path(write_data(tmp_path, "train", 3)).read_bytes()
    lines = json.dumps(load_rows([tmp_path / "train.parquet"], DataConfig(), "train").rows([0])[0]).encode()
    files = {"data/train[0].parquet": parquet, "data/train0.parquet": b"other", "more.jsonl": lines}
    old = hub.add(f"datasets/{SET}", files, branch="v1")
    new = hub.add(f"datasets/{SET}", files | {"README.md": b"new"})
    names = [f"hf://datasets/{SET}@v1/data/train[0].parquet", f"hf://datasets/{SET}/more.jsonl"]
    with pytest.raises(InvalidData, match=r"not completely in the Hub's cache .*`rolemesh fetch"):
        load_rows(names, DataConfig(), "train")
    assert hub.requests == []

    job = fetched(job_of(tiny_model, *names))
    assert job.data.train_files == [
        f"hf://datasets/{SET}@{old}/data/train[0].parquet",
        f"hf://datasets/{SET}@{new}/more.jsonl",
    ]
    assert hub.sent.keys() - {""} == {"data/train[0].parquet", "more.jsonl"}
    num_requests = len(hub.requests)
    stop_asking(monkeypatch)
    assert pinned(job_of(tiny_model, *names)).data == job.data
    rows = load_rows(job.data.train_files, job.data, "train").rows(range(4))
    assert rows[3] == rows[0]
    assert len(hub.requests) == num_requests


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (f"hf://datasets/{SET}/absent.parquet", "the data set Owner/Sums has no file 'absent.parquet'"),
        ("hf://datasets/Owner/Absent/a.parquet", "Owner/Absent is not a dataset at http"),
        (f"hf://datasets/{SET}@v9/a.parquet", "has no revision 'v9' at http"),
        (f"hf://datasets/{SET}", "expected hf://datasets/OWNER/NAME/FILE"),
        (f"hf://datasets/{SET}/../a.parquet", "expected hf://datasets/OWNER/NAME/FILE"),
        (f"hf://{SET}/a.parquet", "expected hf://datasets/OWNER/NAME/FILE"),
        ("hf://datasets/Owner/_absent/a.parquet", "Owner/_absent is not a dataset at http"),  # may be a name
        ("hf://datasets/_Owner/absent/a.parquet", "_Owner/absent is not a dataset at http"),
        ("hf://datasets/Owner/My Sums/a.parquet", "Owner/My Sums is not a name at the Hub: "),
        ("hf://datasets/../Sums/a.parquet", "../Sums is not a name at the Hub: "),
        ("hf://datasets/Owner/Su--ms/a.parquet", "Owner/Su--ms is not a name at the Hub: "),
    ],
)
def test_a_wrong_name_of_a_file_is_refused_and_named(hub: Hub, tiny_model: Path, file: str, words: str) -> None:
    hub.add(f"datasets/{SET}", {"a.parquet": b""})
    with pytest.raises(InvalidData) as failed:
        fetched(job_of(tiny_model, file))
    assert words in str(failed.value)
    assert file in str(failed.value)
