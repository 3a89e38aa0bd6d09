"""Rows of Parquet files in verl's layout (one dict a row), read as one set and written.

data_source: str                           picks the reward function
prompt: list of {role: str, content: str}  the chat so far
ability: str
reward_model: {style: "rule" | "model", ground_truth: str | list | {target}}
extra_info: {split: str, index: int, ...}  anything
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rolemesh.errors import InvalidData


class ParquetRows:
    """The rows of several files, one after the other. Files may differ in their schemas: each keeps its own.

    Args:
        files: Parquet files.
        required: columns that every file must have.

    Raises:
        InvalidData: no file, no such file, not Parquet, a file without rows or without a required column.
    """

    def __init__(self, files: Sequence[str | Path], required: Sequence[str]) -> None:
        if not files:
            raise InvalidData("no Parquet file given (data.train_files, data.val_files)")
        self.files = [Path(file) for file in files]
        self._tables = [read_table(file, required) for file in self.files]
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        file, at = self._find(row)
        cells: dict[str, Any] = self._tables[file].slice(at, 1).to_pylist()[0]
        return cells

    def where(self, row: int) -> str:
        """ "train.parquet, row 12": for messages. Rows count from 0 in each file."""
        file, at = self._find(row)
        return f"{self.files[file]}, row {at}"

    def _find(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def read_table(file: Path, required: Sequence[str]) -> pa.Table:
    """One file's table. Raises InvalidData as ParquetRows does."""
    if not file.is_file():
        raise InvalidData(f"no such file: {file}")
    try:
        table = pq.read_table(file)
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None):  # the disk's, and not the file's fault: it may be there again later
            raise
        raise InvalidData(f"{file} cannot be read as Parquet: {error}") from error
    if missing := [column for column in required if column not in table.column_names]:
        raise InvalidData(f"{file} has no column {missing}; it has {table.column_names}")
    if not len(table):
        raise InvalidData(f"{file} has no rows")
    return table


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes rows as one Parquet file, whole or not at all. Directories are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".unfinished")
    pq.write_table(pa.Table.from_pylist(list(rows)), unfinished)
    unfinished.replace(file)
    return file
