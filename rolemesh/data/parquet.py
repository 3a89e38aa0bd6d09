"""Rows of Parquet files in verl's layout (one dict a row), read as one set and written.

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
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rolemesh.data.column_process import TooLarge, read_bounded
from rolemesh.errors import InvalidData

MAX_DEPTH = 64  # of lists and dicts in one another, as on the wire
# For each column of a file: a file of kilobytes may hold any size, since equal cells pack well.
MAX_COLUMN_BYTES = 4 << 30  # of cells, unpacked; all prompts of a run are held in memory
MAX_COLUMN_VALUES = 1 << 26  # texts, numbers and booleans
LIST_BYTES = 8  # where a list begins
AT_ONCE = 1 << 20  # texts that are measured
LONGEST_NUMBER = 32  # bytes: a decimal's, of 256 bits
# Of texts that Arrow can read as dictionaries, each different one once.
SHARED = {"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"}


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
    """One file's table, of these columns, with texts as dictionaries: each different one is held once. Columns
    with texts in a delta encoding are read as they are, in a process of bounded memory.

    Raises:
        InvalidData: as ParquetRows does, or a column is larger than MAX_COLUMN_BYTES or MAX_COLUMN_VALUES.
    """
    if not file.is_file():
        raise InvalidData(f"no such file: {file}")
    try:
        metadata = pq.read_metadata(file)
        with pq.ParquetFile(file, read_dictionary=_texts(metadata, (*required, *optional))) as opened:
            names = opened.schema_arrow.names
            if missing := [column for column in required if column not in names]:
                raise InvalidData(f"{file} has no column {missing}; it has {names}")
            wanted = [column for column in (*required, *optional) if column in names]
            if twice := [column for column in wanted if names.count(column) > 1]:
                raise InvalidData(f"{file} has two columns {twice[0]!r}")
            _check_claim(metadata, wanted, file)
            table = _read(opened, wanted, file)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None):  # the disk's, and not the file's fault: it may be there again later
            raise
        raise InvalidData(f"{file} cannot be read as Parquet: {error}") from error
    if not len(table):
        raise InvalidData(f"{file} has no rows")
    for column in wanted:
        check_cells(table.column(column), f"column {column!r}", file)
    return table


def _texts(metadata: Any, wanted: Sequence[str]) -> list[str]:
    """Paths of the columns, and of the parts of columns, that are text or bytes and can be dictionaries."""
    texts = {leaf.path for leaf in _leaves(metadata, wanted) if leaf.physical_type == "BYTE_ARRAY"}
    return sorted(texts - _unshared(metadata))


def _leaves(metadata: Any, wanted: Sequence[str]) -> list[Any]:
    """The parts of these columns that hold values."""
    leaves = map(metadata.schema.column, range(len(metadata.schema)))
    return [leaf for leaf in leaves if any(_is_part(leaf.path, column) for column in wanted)]


def _is_part(path: str, column: str) -> bool:
    return path == column or path.startswith(f"{column}.")


def _chunks(metadata: Any) -> Iterator[Any]:
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        yield from map(group.column, range(group.num_columns))


def _unshared(metadata: Any) -> set[str]:
    """Paths of texts or bytes that are somewhere in an encoding which Arrow reads only as it is."""
    texts = (chunk for chunk in _chunks(metadata) if chunk.physical_type == "BYTE_ARRAY")
    return {chunk.path_in_schema for chunk in texts if not SHARED.issuperset(chunk.encodings)}


def _check_claim(metadata: Any, wanted: Sequence[str], file: Path) -> None:
    """Refuses a file that says of itself that it is too large, before a page of it is unpacked."""
    for leaf in _leaves(metadata, wanted):
        # Of equal ones kilobytes hold any size, and Arrow has no dictionaries of them.
        if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > LONGEST_NUMBER:
            raise InvalidData(
                f"{file}: column {leaf.path!r} holds bytes, {leaf.length:,} in a cell; write them as text"
            )
    claims: dict[str, tuple[int, int]] = {}  # bytes and values, by path
    for chunk in _chunks(metadata):
        num_bytes, num_values = claims.get(chunk.path_in_schema, (0, 0))
        num_bytes, num_values = num_bytes + chunk.total_uncompressed_size, num_values + chunk.num_values
        claims[chunk.path_in_schema] = num_bytes, num_values
    for path, (num_bytes, num_values) in claims.items():
        for column in wanted:
            if not _is_part(path, column):
                continue
            if num_bytes > MAX_COLUMN_BYTES or num_values > MAX_COLUMN_VALUES:
                raise _too_large(file, column, f"{num_bytes:,} bytes in {num_values:,} values")


def _too_large(file: Path, column: str, size: str) -> InvalidData:
    return InvalidData(
        f"{file}: column {column!r} unpacks to {size}; at most {MAX_COLUMN_BYTES:,} bytes and "
        f"{MAX_COLUMN_VALUES:,} values are read of a file: split it"
    )


def _read(opened: Any, wanted: Sequence[str], file: Path) -> pa.Table:
    """The table, as long as no column is too large."""
    unshared = _unshared(opened.metadata)
    apart = [column for column in wanted if any(_is_part(path, column) for path in unshared)]
    together = _read_groups(opened, [column for column in wanted if column not in apart], file)
    columns = {column: together.column(column) for column in together.column_names}
    for column in apart:
        try:
            columns[column] = read_bounded(file, column, MAX_COLUMN_BYTES).column(column)
        except TooLarge:
            raise _too_large(file, column, f"more than {MAX_COLUMN_BYTES:,} bytes") from None
    return pa.table({column: columns[column] for column in wanted})


def _read_groups(opened: Any, wanted: Sequence[str], file: Path) -> pa.Table:
    """A row group at a time."""
    groups, sizes = [opened.schema_arrow.empty_table().select(wanted)], dict.fromkeys(wanted, 0)
    for at in range(opened.num_row_groups if wanted else 0):
        groups.append(opened.read_row_group(at, columns=wanted).select(wanted))
        for column in wanted:
            sizes[column] += sum(map(unpacked_bytes, groups[-1].column(column).chunks))
            if sizes[column] > MAX_COLUMN_BYTES:
                raise _too_large(file, column, f"{sizes[column]:,} bytes")
    return pa.concat_tables(groups)


def unpacked_bytes(array: Any) -> int:
    """What an array's cells take, each with a text of its own."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return unpacked_bytes(array.storage)
    if pa.types.is_struct(kind):
        return sum(map(unpacked_bytes, array.flatten()))
    if pa.types.is_map(kind):  # it has no flatten
        return unpacked_bytes(array.keys) + unpacked_bytes(array.items)
    if pa.types.is_nested(kind):
        return LIST_BYTES * len(array) + unpacked_bytes(array.flatten())
    if not pa.types.is_dictionary(kind) or not _has_lengths(kind.value_type):
        return int(array.nbytes)
    lengths, total = pc.binary_length(array.dictionary), array.indices.nbytes
    for first in range(0, len(array), AT_ONCE):
        total += pc.sum(lengths.take(array.indices.slice(first, AT_ONCE))).as_py() or 0
    return int(total)


def _has_lengths(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        (types.is_string(kind), types.is_large_string(kind), types.is_binary(kind), types.is_large_binary(kind))
    )


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
