"""Parquet from outside: what no batch can carry is an error at start that names file, row and column."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_rows import BYTES, LIMIT, dataset, row

from rolemesh.config.data import DataConfig
from rolemesh.data import PromptDataset, column_process, parquet
from rolemesh.data.converters.gsm8k_dataset import gsm8k_rows
from rolemesh.data.parquet import read_table, write_rows
from rolemesh.errors import InvalidData

# -------------------------------------------------------------------------------------------- cells

DATE = datetime.date(2020, 1, 2)
CELLS = {
    "a date": ({"made": DATE}, r"\(in it made\) holds a date, datetime.date\(2020, 1, 2\)"),
    "a time stamp": ({"at": {"a": [datetime.datetime(2020, 1, 2)]}}, r"\(in it at.a\[\]\) holds a datetime"),
    "bytes": ({"image": b"\x89PNG"}, r"\(in it image\) holds a bytes, b'.x89PNG'"),
    "a decimal": ({"price": decimal.Decimal("1.50")}, r"\(in it price\) holds a Decimal, Decimal\('1.50'\)"),
    "a duration": ({"took": datetime.timedelta(1)}, r"\(in it took\) holds a timedelta"),
}


@pytest.mark.parametrize("case", CELLS)
def test_a_value_json_lacks_is_named_with_file_row_and_column(case: str, tmp_path: Path) -> None:
    cell, words = CELLS[case]
    file = write_rows(tmp_path / "a.parquet", [row(), row(extra_info=None), row(extra_info=cell)])
    with pytest.raises(InvalidData, match=r"a\.parquet, row 2: column 'extra_info' " + words) as error:
        dataset(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model", "extra_info"])
def test_text_that_is_not_utf8_is_named_in_every_column(column: str, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row("é"), row(), row()])

    def spoiled(array: pa.Array) -> pa.Array:
        """The same, its last text two bytes that are no UTF-8."""
        if pa.types.is_string(array.type):
            texts = [text.encode() for text in array.to_pylist()]
            ends = [sum(map(len, texts[: k + 1])) for k in range(len(texts) - 1)]
            texts[-1] = b"\xff\xfe"
            offsets = [0, *ends, ends[-1] + 2]
            buffers = [pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(texts))]
            return pa.Array.from_buffers(pa.string(), len(texts), [None, *buffers])
        if pa.types.is_list(array.type):
            return pa.ListArray.from_arrays(array.offsets, spoiled(array.flatten()))
        fields = [array.field(k) for k in range(array.type.num_fields)]
        fields = [spoiled(f) if pa.types.is_string(f.type) else f for f in fields]
        return pa.StructArray.from_arrays(fields, names=[field.name for field in array.type])

    if column == "extra_info":
        table = table.set_column(3, column, pa.array([{"split": "a"}, {"split": "b"}, {"split": "c"}]))
    at = table.column_names.index(column)
    table = table.set_column(at, column, spoiled(table.column(column).combine_chunks()))
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InvalidData, match=rf"a\.parquet, row 2: column '{column}' is not UTF-8"):
        dataset(tmp_path / "a.parquet")


NO_CHATS = {
    "no content": [{"role": "user"}],
    "a number": [{"role": "user", "content": 5}],
    "a boolean": [{"role": "user", "content": True}],
    "a role that is none": [{"role": 1, "content": "a"}],
    "no role": [{"content": "a"}],
    "no messages": [],
    "texts": ["a"],
}


@pytest.mark.parametrize("case", NO_CHATS)
def test_a_prompt_that_is_no_chat_of_texts_is_named(case: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row(prompt=NO_CHATS[case])])
    with pytest.raises(
        InvalidData, match=r"row 0: column 'prompt' should hold a list of .role, content., both"
    ):
        dataset(file)


def test_a_column_of_nan_or_nothing_is_named(tmp_path: Path) -> None:
    for column, cells, words in (
        ("prompt", [float("nan")], "should hold a list of"),
        ("prompt", [None], "should hold a list of"),
        ("data_source", [float("nan")], "should hold a str; it holds nan"),
        (
            "reward_model",
            [{"style": "rule", "ground_truth": float("nan")}],
            "has NaN as 'ground_truth'; expected a",
        ),
    ):
        table = pa.Table.from_pylist([row()])
        table = table.set_column(table.column_names.index(column), column, pa.array(cells))
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(InvalidData, match=f"row 0: column '{column}' {words}"):
            dataset(tmp_path / "a.parquet")


def test_a_column_that_is_not_read_may_hold_anything(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.parquet", [row(made=DATE, image=b"\xff", price=decimal.Decimal(1))])
    assert len(dataset(file)) == 1


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row()])
    pq.write_table(table.append_column("prompt", table.column("prompt")), tmp_path / "a.parquet")
    with pytest.raises(InvalidData, match=r"a\.parquet has two columns 'prompt'"):
        dataset(tmp_path / "a.parquet")


def test_rows_are_the_files_whatever_positions_are_asked_for(tmp_path: Path) -> None:
    first = write_rows(tmp_path / "a.parquet", [row(extra_info={"index": k}) for k in range(5)])
    second = write_rows(tmp_path / "b.parquet", [row(extra_info={"other": k}) for k in range(5, 9)])
    data = PromptDataset(
        [first, second], DataConfig(max_prompt_length=LIMIT, train_max_samples=6, seed=3), BYTES
    )
    batch = data.batch(range(6))
    indexes = [next(iter(info.values())) for info in batch["extra_info"]]
    assert [f"train-{k:06d}" for k in indexes] == batch["uid"].tolist()
    assert {*batch["extra_info"][0]} == {"index"} != {*batch["extra_info"][5]}


@pytest.mark.parametrize("line", ["[" * 100_000, '{"question": ' + "1" * 5000 + "}", '"\\ud800"'])
def test_a_hostile_jsonl_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"question": "q", "answer": "#### 1"}\n' + line)
    with pytest.raises(InvalidData, match=r"train\.jsonl, line 2: expected an object"):
        gsm8k_rows(file)
    file.write_bytes(b'{"question": "q", "answer": "#### 1"}\n{"question": "\xff", "answer": "#### 1"}')
    with pytest.raises(InvalidData, match=r"train\.jsonl, line 2: not UTF-8"):
        gsm8k_rows(file)
    file.write_text('{"question": "\\ud800", "answer": "#### 1"}')
    with pytest.raises(InvalidData, match=r"train\.jsonl, line 1: .*half a surrogate pair"):
        gsm8k_rows(file)


# ------------------------------------------------------------------------------------------- bombs


POOLS: list[pa.MemoryPool] = []  # buffers outlive the reading, and a pool has to outlive them


def peak_of(read: Callable[[], object]) -> int:
    """The most bytes that Arrow held meanwhile."""
    before, watched = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    POOLS.append(watched)
    pa.set_memory_pool(watched)
    try:
        read()
    finally:
        pa.set_memory_pool(before)
    return int(watched.max_memory())


def equal_texts(number: int, size: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * number, pa.int32()), pa.array(["z" * size]))


BOMBS = {
    "text": equal_texts(100_000, 1_000_000),
    "a dict's text": pa.StructArray.from_arrays([equal_texts(100_000, 1_000_000)], names=["style"]),
    "one list": pa.ListArray.from_arrays(pa.array([0, 100_000], pa.int32()), equal_texts(100_000, 1_000_000)),
    "one map": pa.MapArray.from_arrays(
        pa.array([0, 100_000], pa.int32()),
        pa.array(list(map(str, range(100_000)))),
        equal_texts(100_000, 1_000_000),
    ),
}


@pytest.mark.parametrize("case", BOMBS)
def test_kilobytes_that_unpack_to_100_gigabytes_are_refused(case: str, tmp_path: Path) -> None:
    """The error names file and column, and nothing is unpacked."""
    file, column = tmp_path / "a.parquet", BOMBS[case]
    pq.write_table(pa.table({"reward_model": column}), file)
    assert file.stat().st_size < 2 << 20

    def read() -> None:
        words = (
            r"a\.parquet: column 'reward_model' unpacks to 100,\d{3},\d{3},\d{3} bytes; at most .*: split it"
        )
        with pytest.raises(InvalidData, match=words):
            read_table(file, ["reward_model"])

    assert peak_of(read) < 64 << 20


@pytest.mark.parametrize(
    ("limit", "cells"),
    [
        ("MAX_COLUMN_BYTES", ["z" * 1_000_000 + str(k) for k in range(32)]),
        ("MAX_COLUMN_VALUES", [None] * 2_000_000),
    ],
)
def test_a_file_that_declares_too_large_a_size_is_refused_unread(
    limit: str, cells: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of a lower limit. A column that is not read may be of any size."""
    monkeypatch.setattr(parquet, limit, 1 << 20)
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"large": pa.array(cells, pa.string()), "small": [1] * len(cells)}), file)

    def read() -> None:
        with pytest.raises(InvalidData, match=r"a\.parquet: column 'large' unpacks to [\d,]+ bytes in"):
            read_table(file, ["small"], ["large"])

    assert peak_of(read) < 1 << 20
    if limit == "MAX_COLUMN_BYTES":
        assert len(read_table(file, ["small"])) == len(cells)


def test_fixed_size_bytes_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    """Arrow has no dictionaries of them: 2 KB were gigabytes."""
    file = tmp_path / "a.parquet"
    cells = pa.array([b"z" * (64 << 10)] * 512, pa.binary(64 << 10))
    pq.write_table(pa.table({"image": pa.StructArray.from_arrays([cells], names=["raw"])}), file)
    assert file.stat().st_size < 8 << 10

    def read() -> None:
        with pytest.raises(InvalidData, match=r"a\.parquet: column 'image.raw' holds bytes, 65,536 in a cell"):
            read_table(file, ["image"])

    assert peak_of(read) < 1 << 20


ENCODINGS = ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]
LEAVES = [
    "data_source",
    "prompt.list.element.content",
    "prompt.list.element.role",
    "reward_model.ground_truth",
    "reward_model.style",
]


def write_encoded(file: Path, groups: list[list[dict[str, Any]]], encodings: list[str]) -> None:
    """One row group after another; the leaves of texts take turns with the encodings."""
    tables = [pa.Table.from_pylist(rows) for rows in groups]
    turns = {leaf: encodings[at % len(encodings)] for at, leaf in enumerate(LEAVES)}
    with pq.ParquetWriter(
        file, tables[0].schema, use_dictionary=False, column_encoding={**turns, "extra_info.index": "PLAIN"}
    ) as writer:
        for table in tables:
            writer.write_table(table)


@pytest.mark.parametrize("encodings", [[name] for name in ENCODINGS] + [ENCODINGS], ids="-".join)
def test_texts_of_every_encoding_are_read_as_they_were_written(encodings: list[str], tmp_path: Path) -> None:
    """At the top and in lists and dicts, empty and absent ones too, in several row groups."""
    rows = [row(f"{'what is ' * (at % 3)}{at}é", extra_info={"index": at}) for at in range(200)]
    rows[7].update(prompt=[], data_source=None)
    rows[8].update(prompt=[{"role": "user", "content": None}], reward_model=None)
    rows[9].update(prompt=None, data_source="")
    file = tmp_path / "a.parquet"
    write_encoded(file, [rows[:120], rows[120:]], encodings)
    found = {chunk for leaf in range(6) for chunk in pq.read_metadata(file).row_group(1).column(leaf).encodings}
    assert found >= set(encodings)
    assert read_table(file, ["data_source", "prompt"], ["reward_model", "extra_info"]).to_pylist() == [
        {key: cells[key] for key in ("data_source", "prompt", "reward_model", "extra_info")} for cells in rows
    ]
    assert len(dataset(write_rows(tmp_path / "b.parquet", rows[10:]))) == 190


MOST_OF = """
import resource, subprocess, sys

code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
"""


def delta_bomb(kind: str, number: int, size: int) -> pa.Array:
    texts = pa.array(["z" * size] * number)
    if kind == "one list":
        return pa.ListArray.from_arrays(pa.array([0, number], pa.int32()), texts)
    return pa.StructArray.from_arrays([texts], names=["style"]) if kind == "a dict's text" else texts


@pytest.mark.parametrize("kind", ["text", "a dict's text", "one list"])
def test_texts_with_shared_prefixes_are_counted_whole_not_held(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of a lower limit: 256 MiB in a file of kilobytes."""
    monkeypatch.setattr(parquet, "MAX_COLUMN_BYTES", 8 << 20)
    file = tmp_path / "a.parquet"
    table = pa.table({"reward_model": delta_bomb(kind, 1024, 256 << 10)})
    path = {"a dict's text": "reward_model.style", "one list": "reward_model.list.element"}.get(kind)
    encoding = {path or "reward_model": "DELTA_BYTE_ARRAY"}
    pq.write_table(table, file, use_dictionary=False, column_encoding=encoding)
    assert file.stat().st_size < 2 << 20

    def read() -> None:
        words = r"column 'reward_model' unpacks to more than 8,388,608 bytes; at most .*: split it"
        with pytest.raises(InvalidData, match=words):
            read_table(file, ["reward_model"])

    assert peak_of(read) < 32 << 20
    command = [sys.executable, "-P", column_process.__file__, str(file), "reward_model", str(8 << 20)]
    ended = subprocess.run([sys.executable, "-c", MOST_OF, *command], capture_output=True, check=True)
    code, peak = map(int, ended.stdout.split())
    assert (code, peak < 256 << 20) == (column_process.TOO_LARGE, True)


def test_a_damaged_column_of_delta_texts_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_encoded(file, [[row("hello")] * 100], ["DELTA_BYTE_ARRAY"])
    chunk = pq.read_metadata(file).row_group(0).column(0)
    whole = bytearray(file.read_bytes())
    at = chunk.data_page_offset
    whole[at : at + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    file.write_bytes(whole)
    with pytest.raises(InvalidData, match=r"a\.parquet cannot be read as Parquet: column 'data_source': "):
        read_table(file, ["data_source"])
