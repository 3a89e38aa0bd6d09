"""JSON Lines as training files: the same run as from Parquet, and each bad line is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from in_process import recorded, small_job, train
from test_publishers_files import written

from rolemesh.config import JobConfig
from rolemesh.config.data import DataConfig
from rolemesh.data import json_lines
from rolemesh.data.dataset import PromptDataset
from rolemesh.data.row_source import load_rows
from rolemesh.errors import InvalidData
from rolemesh.models.loading import AutoTokenizer


def row(number: int, **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "digits",
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
        **extra,
    }


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.jsonl.gz"])
def test_rows_are_those_of_the_file_and_may_differ_in_shape(
    tmp_path: Path, tiny_model: Path, name: str
) -> None:
    rows = [row(1), row(2, reward_model={"ground_truth": ["3", "three"]}, unknown=[1.5]), row(3)]
    del rows[2]["extra_info"]
    file = written(tmp_path / name, "\n".join(map(json.dumps, rows)) + "\n\n")
    source = load_rows([str(file)], DataConfig(), "train")
    del rows[1]["unknown"]  # a column that nothing reads
    assert source.rows([2, 0, 1]) == [rows[2], rows[0], rows[1]]
    assert source.where(1) == f"{file}, row 1"
    data = PromptDataset([file], DataConfig(max_prompt_length=64), AutoTokenizer.from_pretrained(tiny_model))
    assert data.batch([1])["reward_model"].tolist() == [{"ground_truth": ["3", "three"]}]


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, name: str) -> None:
    text = "\ufeff" + "\n".join(map(json.dumps, [row(1), row(2)]))
    source = load_rows([str(written(tmp_path / name, text))], DataConfig(), "train")
    assert source.rows([0, 1]) == [row(1), row(2)]


def as_json_lines(job: JobConfig, directory: Path) -> JobConfig:
    """The same job with its training file's rows as JSON Lines."""
    rows = pq.read_table(job.data.train_files[0]).to_pylist()
    files = [str(written(directory / "train.jsonl", rows))]
    return job.model_copy(update={"data": job.data.model_copy(update={"train_files": files})})


async def test_a_run_that_is_resumed_has_the_bits_of_one_from_parquet(tiny_model: Path, tmp_path: Path) -> None:
    jobs = []
    for name, steps in (("parquet", ["4"]), ("lines", ["2", "4"])):
        (tmp_path / name).mkdir()
        for total in steps:
            overrides = (f"trainer.total_training_steps={total}", "trainer.save_freq=2")
            job = small_job(tmp_path / name, tiny_model, "run", *overrides)
            jobs.append(as_json_lines(job, tmp_path) if name == "lines" else job)
            await train(jobs[-1])
    whole, _, resumed = jobs
    assert recorded(resumed) == recorded(whole)
    files = [job.run_dir / "global_step_4" / "actor" / "model.safetensors" for job in (whole, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"[1]", "row 1: expected a JSON object on one line"),
        (b'{"prompt": ', "row 1: expected a JSON object on one line"),
        (b'{"prompt": 1}', r"row 1 has no column \['data_source', 'reward_model'\]; it has \['prompt'\]"),
        (json.dumps(row(1, extra_info=float("nan"))).encode(), "NaN is not JSON"),
        (json.dumps(row(1, extra_info=1 << 64)).encode(), "has more than 64 bits; write it as text"),
        (json.dumps(row(1, extra_info="\ud800")).encode(), "row 1: not UTF-8, or half a surrogate pair"),
        (
            json.dumps(row(1, extra_info=b"\xff".decode("latin1")), ensure_ascii=False).encode("latin1"),
            "not UTF-8",
        ),
        (
            json.dumps(row(1)).replace('{"index": 1}', "[" * 70 + "]" * 70).encode(),
            "nests deeper than 64 levels",
        ),
        (b"[" * 100_000, "row 1: expected a JSON object on one line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(json.dumps(row(0)).encode() + b"\n" + line + b"\n")
    with pytest.raises(InvalidData, match=words):
        load_rows([str(file)], DataConfig(), "train")


def test_a_damaged_or_too_large_or_empty_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.jsonl.gz"
    content = gzip.compress(b"".join(json.dumps(row(i)).encode() + b"\n" for i in range(2000)))
    for damaged, words in (
        (content[:-20], "cannot be read as gzip"),
        (b"no gzip", "cannot be read as gzip"),
        (gzip.compress(b"\n"), "has no rows"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(InvalidData, match=words):
            load_rows([str(file)], DataConfig(), "train")
    file.write_bytes(content)
    monkeypatch.setattr(json_lines, "MAX_COLUMN_BYTES", 1 << 16)
    with pytest.raises(InvalidData, match="unpacks to more than 65,536 bytes"):
        load_rows([str(file)], DataConfig(), "train")
    with pytest.raises(InvalidData, match="no such file"):
        load_rows([str(tmp_path / "absent.jsonl")], DataConfig(), "train")
