"""Reads several files in verl's layout, Parquet or JSON Lines, as one list of rows (dicts).

data_source: str                           picks the reward function
prompt: list of {role: str, content: str}  the chat so far
ability: str
reward_model: {style: "rule" | "model", ground_truth: str | list | {target}}
extra_info: {split: str, index: int, ...}  anything
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from rolemesh.config.data import DataConfig
from rolemesh.data.json_cells import decoded, holds_json
from rolemesh.data.json_lines import is_json_lines, read_json_table, records, table_of
from rolemesh.data.parquet import read_table, read_whole
from rolemesh.errors import InvalidData


class FileRows:
    """The rows of several files in sequence. The files may have different schemas.

    Args:
        files: Parquet files, or JSON Lines by their names (.jsonl, .json, also with .gz).
        required: columns that every file must have.
        optional: columns that are read if a file has them. Other columns are not read.
        keys: the job file's key that names a column, by the column; errors name it.

    Raises:
        InvalidData: no file, no such file, not of its kind, a file without rows or without a required column, a
            column that is too large, or a cell that JSON cannot represent.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        required: Sequence[str],
        optional: Sequence[str] = (),
        keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if not files:
            raise InvalidData("no file given (data.train_files, data.val_files)")
        self.files = [Path(file) for file in files]
        self._tables = [_read(file, required, optional, keys) for file in self.files]
        self._ends = list(accumulate(len(table) for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def rows(self, positions: Iterable[int]) -> list[dict[str, Any]]:
        """Return the rows at these positions, counted over all files.

        A key within a cell that is null in Parquet is left out: Arrow gives every row the keys of all rows.
        Cells of Arrow's JSON type are decoded, and keep their nulls.
        """
        places = [self._find(position) for position in positions]
        rows: list[dict[str, Any]] = []
        # Convert neighbouring rows together: one at a time takes six times as long.
        for (file, _), run in groupby(enumerate(places), key=lambda item: (item[1][0], item[1][1] - item[0])):
            together = [at for _, (_, at) in run]
            table = self._tables[file]
            cells = table.slice(together[0], len(together)).to_pylist()
            if isinstance(table, pa.Table):
                kinds = {field.name: field.type for field in table.schema if holds_json(field.type)}
                cells = [without_fill_ins(row) for row in cells]
                for row in cells if kinds else ():
                    row |= {name: decoded(row[name], kind) for name, kind in kinds.items()}
            rows += cells
        return rows

    def where(self, row: int) -> str:
        """Name a row in messages, as in "train.parquet, row 12". Rows count from 0 in each file."""
        file, at = self._find(row)
        return f"{self.files[file]}, row {at}"

    def columns(self) -> Iterator[tuple[Path, set[str]]]:
        """Yield each file with the columns that were read from it."""
        for file, table in zip(self.files, self._tables, strict=True):
            yield file, set(table.column_names)

    def _find(self, row: int) -> tuple[int, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        file = bisect_right(self._ends, row)
        return file, row - (self._ends[file - 1] if file else 0)


def without_fill_ins(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without the keys, at any depth of its cells, whose values are null.

    Where a column's rows have different keys, Arrow adds the others' with null. So `{"x": 0}` in one row and
    `{"text": "hi"}` in another would reach templates and functions as `{"x": 0, "text": None}`.
    """
    return {column: _without_nulls(cell) for column, cell in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def read_rows(files: Sequence[str | Path], config: DataConfig, split: str) -> FileRows:
    """Return the rows of Parquet and JSON Lines files: the data set "parquet"."""
    required = dict.fromkeys((config.prompt_key, config.reward_fn_key, config.reward_model_key))
    return FileRows(files, tuple(required), ("extra_info", "agent_name"), keys_of_columns(config))


def keys_of_columns(config: DataConfig) -> dict[str, str]:
    """Return the keys that name the columns of prompts, by column."""
    names = ("prompt_key", "reward_fn_key", "reward_model_key")
    return {getattr(config, name): f"data.{name}" for name in names}


def read_answered_rows(files: Sequence[str | Path], config: DataConfig, layout: str) -> FileRows:
    """Return the rows of files with responses, or with pairs of them.

    Args:
        files: the files.
        config: names the columns.
        layout: "responses": conversations, or prompts with responses; "pairs": chosen and rejected.

    Raises:
        InvalidData: as FileRows; or a file has no such columns.
    """
    one = (config.prompt_key, config.response_key)
    pair = (config.chosen_key, config.rejected_key)
    wanted = [pair] if layout == "pairs" else [(config.messages_key,), one]
    columns = [column for key in (config.messages_key, *one, *pair) for column in (key, key.partition(".")[0])]
    rows = FileRows(files, (), tuple(dict.fromkeys((*columns, config.tools_key, config.reward_fn_key))))
    for file, names in rows.columns():
        if not any(all({key, key.partition(".")[0]} & names for key in keys) for keys in wanted):
            needed = ", or ".join(" and ".join(map(repr, keys)) for keys in wanted)
            raise InvalidData(
                f"{file} lacks columns: {needed} wanted (data.*_key); of these it has {sorted(names)}"
            )
    return rows


def read_all_columns(files: Sequence[Path]) -> pa.Table:
    """Return the rows of Parquet and JSON Lines files with all their columns, as one table.

    Raises:
        InvalidData: as FileRows; or a column has other types in another file, or in other lines of one.
    """
    tables = [
        table_of([row for _, _, row in records(file)], str(file)) if is_json_lines(file) else read_whole(file)
        for file in files
    ]
    try:
        return pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise InvalidData(
            f"the columns of {', '.join(map(str, files))} differ: {error}; take one file"
        ) from error


def _read(file: Path, required: Sequence[str], optional: Sequence[str], keys: Mapping[str, str]) -> Any:
    return (read_json_table if is_json_lines(file) else read_table)(file, required, optional, keys)
