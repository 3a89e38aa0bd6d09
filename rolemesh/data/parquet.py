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
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rolemesh.errors import InvalidData

MAX_DEPTH = 64  # of lists and dicts in one another, as on the wire


class ParquetRows:
    """The rows of several files, one after the other. Files may differ in their schemas: each keeps its own.

    Args:
        files: Parquet files.
        required: columns that every file must have.
        optional: columns that are read where a file has them. Others are not read.

    Raises:
        InvalidData: no file, no such file, not Parquet, a file without rows or without a required column,
            a cell that JSON has no place for.
    """

    def __init__(
        self, files: Sequence[str | Path], required: Sequence[str], optional: Sequence[str] = ()
    ) -> None:
        if not files:
            raise InvalidData("no Parquet file given (data.train_files, data.val_files)")
        self.files = [Path(file) for file in files]
        self._tables = [read_table(file, required, optional) for file in self.files]
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def rows(self, positions: Iterable[int]) -> list[dict[str, Any]]:
        """The rows at these positions, which count over all files."""
        places = [self._find(position) for position in positions]
        rows: list[dict[str, Any]] = []
        # A row at a time takes six times as long as neighbours together.
        for (file, _), run in groupby(enumerate(places), key=lambda item: (item[1][0], item[1][1] - item[0])):
            together = [at for _, (_, at) in run]
            rows += self._tables[file].slice(together[0], len(together)).to_pylist()
        return rows

    def where(self, row: int) -> str:
        """ "train.parquet, row 12": for messages. Rows count from 0 in each file."""
        file, at = self._find(row)
        return f"{self.files[file]}, row {at}"

    def _find(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def read_table(file: Path, required: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """One file's table, of these columns. Raises InvalidData as ParquetRows does."""
    if not file.is_file():
        raise InvalidData(f"no such file: {file}")
    try:
        with pq.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if missing := [column for column in required if column not in names]:
                raise InvalidData(f"{file} has no column {missing}; it has {names}")
            wanted = [column for column in (*required, *optional) if column in names]
            if twice := [column for column in wanted if names.count(column) > 1]:
                raise InvalidData(f"{file} has two columns {twice[0]!r}")
            table = opened.read(columns=wanted).select(wanted)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None):  # the disk's, and not the file's fault: it may be there again later
            raise
        raise InvalidData(f"{file} cannot be read as Parquet: {error}") from error
    if not len(table):
        raise InvalidData(f"{file} has no rows")
    for column in wanted:
        check_cells(table.column(column), f"column {column!r}", file)
    return table


def check_cells(column: pa.ChunkedArray, named: str, file: Path) -> None:
    """Refuses what no row could be sent with: text that is not UTF-8, dates, bytes, decimals and whatever else
    JSON does not have.

    Raises:
        InvalidData: names file, row and column.
    """
    try:
        column.validate(full=True)
        if _is_plain(column.type, MAX_DEPTH):
            return
    except pa.ArrowInvalid as error:
        damage: Exception | None = error
    else:
        damage = None
    for row in range(len(column)):
        where = f"{file}, row {row}: {named}"
        try:
            [cell] = column.slice(row, 1).to_pylist()
        except UnicodeDecodeError as error:
            raise InvalidData(f"{where} is not UTF-8: {error.reason} in {error.object!r:.80}") from error
        except (ValueError, OverflowError, pa.ArrowException) as error:  # a date that Python does not have
            raise InvalidData(f"{where} of {column.type} cannot be read: {error}") from error
        if found := _foreign(cell, ""):
            raise InvalidData(f"{where} {found}")
    if damage is not None:
        raise InvalidData(f"{file}: {named} is damaged: {damage}") from damage


def _is_plain(kind: pa.DataType, levels: int) -> bool:
    """Whether all that a column of this type can hold is made of lists, dicts, text, numbers and booleans."""
    if not levels:
        return False
    if pa.types.is_struct(kind):
        return all(_is_plain(field.type, levels - 1) for field in kind)
    if pa.types.is_dictionary(kind):
        return _is_plain(kind.value_type, levels)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type, levels - 1)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_float32(kind)
        or pa.types.is_float64(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )


def _foreign(value: Any, path: str, levels: int = MAX_DEPTH) -> str:
    """What of a cell JSON has no place for, and where in it; empty where there is nothing."""
    if isinstance(value, dict | list) and not levels:
        return f"nests deeper than {MAX_DEPTH} levels"
    if isinstance(value, dict):
        below = ((f"{path}.{key}", inner) for key, inner in value.items())
        return next(filter(None, (_foreign(inner, at, levels - 1) for at, inner in below)), "")
    if isinstance(value, list):
        return next(filter(None, (_foreign(inner, f"{path}[]", levels - 1) for inner in value)), "")
    if value is None or type(value) in (str, int, float, bool):
        return ""
    at = f"(in it {path.removeprefix('.')}) " * bool(path)
    return f"{at}holds a {type(value).__name__}, {value!r:.80}; write it as text or a number"


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes rows as one Parquet file, whole or not at all. Directories are made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".unfinished")
    pq.write_table(pa.Table.from_pylist(list(rows)), unfinished)
    unfinished.replace(file)
    return file
