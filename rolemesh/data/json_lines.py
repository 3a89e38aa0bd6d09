"""Reads JSON Lines: one JSON object a line, in UTF-8 with or without a byte order mark, as text or gzip."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import pyarrow as pa

from rolemesh.data.json_cells import DECODER
from rolemesh.data.parquet import MAX_COLUMN_BYTES, MAX_COLUMN_VALUES, no_columns, not_json, warn_of_media
from rolemesh.errors import InvalidData

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


def is_json_lines(file: Path) -> bool:
    """Return whether a file's name says that it holds JSON Lines."""
    return file.name.endswith(SUFFIXES)


class JsonTable:
    """Rows as lines of JSON, each parsed when it is read. Has the methods of a pyarrow.Table that rows need."""

    def __init__(self, lines: Sequence[bytes], columns: Sequence[str]) -> None:
        self._lines = lines
        self.column_names = columns

    def __len__(self) -> int:
        return len(self._lines)

    def slice(self, offset: int, length: int) -> JsonTable:
        """Return `length` rows from `offset` on."""
        return JsonTable(self._lines[offset : offset + length], self.column_names)

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return the rows, each with the columns that it has."""
        rows = map(json.loads, self._lines)
        return [{name: row[name] for name in self.column_names if name in row} for row in rows]


def read_json_table(
    file: Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    keys: Mapping[str, str] = MappingProxyType({}),
) -> JsonTable:
    """Read and check all rows of a file. They are held as text. The arguments are those of `read_table`.

    Raises:
        InvalidData: no such file, no rows, or as `records`; a row lacks a required column, or one of these
            columns nests too deeply; or the file unpacks to more than is read from one file.
    """
    lines = []
    num_bytes = 0
    having = set[str]()
    for at, line, row in records(file):
        where = f"{file}, row {at}"
        if missing := [column for column in required if column not in row]:
            raise no_columns(where, missing, sorted(row), keys)
        for column in (*required, *optional):
            if found := not_json(row.get(column), ""):
                raise InvalidData(f"{where}: column {column!r} {found}")
        having |= row.keys()
        lines.append(line)
        num_bytes += len(line)
        if num_bytes > MAX_COLUMN_BYTES or len(lines) > MAX_COLUMN_VALUES:
            raise InvalidData(
                f"{file} unpacks to more than {MAX_COLUMN_BYTES:,} bytes or {MAX_COLUMN_VALUES:,} rows; split "
                "it"
            )
    if not lines:
        raise InvalidData(f"{file} has no rows")
    warn_of_media(file, having)
    return JsonTable(lines, [name for name in (*required, *optional) if name in having])


def records(file: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield the rows of a file, one at a time: position from 0, text and value. Blank lines are skipped.

    Raises:
        InvalidData: no such file; or a line that is not a JSON object in UTF-8, or has a number that JSON or 64
            bits do not have. The message names file and row.
    """
    at = 0
    for line in _lines(file):
        if not line.strip():
            continue
        try:
            row = DECODER.decode(line.decode())
            if b"\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is not text
        except UnicodeError as error:
            raise InvalidData(
                f"{file}, row {at}: not UTF-8, or half a surrogate pair: {error.reason}"  # type: ignore[attr-defined]
            ) from error
        except (ValueError, RecursionError) as error:
            raise InvalidData(
                f"{file}, row {at}: expected a JSON object on one line; got {line[:80]!r}: {error}"
            ) from error
        if not isinstance(row, dict):
            raise InvalidData(f"{file}, row {at}: expected a JSON object on one line; got {line[:80]!r}")
        yield at, line, row
        at += 1


def table_of(rows: Sequence[Mapping[str, Any]], where: str) -> pa.Table:
    """Return rows as a table, with null where a row lacks a column or a key.

    Raises:
        InvalidData: a column has values of several types. The message begins with `where`.
    """
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            raise InvalidData(
                f"{where}: column {name!r} has values of several types, and Parquet needs one: {error}"
            ) from error
    return pa.table(columns)


def _lines(file: Path) -> Iterator[bytes]:
    if not file.is_file():
        raise InvalidData(f"no such file: {file}")
    try:
        with _opened(file) as opened:
            line = opened.readline(MAX_COLUMN_BYTES).removeprefix(codecs.BOM_UTF8)
            while line:
                yield line
                line = opened.readline(MAX_COLUMN_BYTES)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidData(f"{file} cannot be read as gzip: {error}") from error


def _opened(file: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")
