"""Reads a Parquet file, of any size and from anybody, and writes such files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rolemesh.data.column_process import TooLarge, read_bounded
from rolemesh.data.json_cells import decoded
from rolemesh.errors import InvalidData

logger = logging.getLogger(__name__)

MEDIA_COLUMNS = ("images", "videos", "audios")  # verl's names
MAX_DEPTH = 64  # nesting of lists and dicts, as on the wire
# Limits for each column of a file. A file of kilobytes may unpack to any size, since equal cells compress well.
MAX_COLUMN_BYTES = 4 << 30  # unpacked cells; all prompts of a run are held in memory
MAX_COLUMN_VALUES = 1 << 26  # texts, numbers and booleans
LIST_BYTES = 8  # for a list's offset
AT_ONCE = 1 << 20  # cells measured at once
ROWS_AT_ONCE = 500  # rows written at once; a row with tests may have megabytes
LONGEST_NUMBER = 32  # bytes of the longest number, a decimal of 256 bits
# Encodings of texts that Arrow can read as dictionaries, which hold each distinct text once.
SHARED = {"PLAIN", "PLAIN_DICTIONARY", "RLE_DICTIONARY", "RLE", "BIT_PACKED"}


def read_table(
    file: Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    keys: Mapping[str, str] = MappingProxyType({}),
) -> pa.Table:
    """Read these columns of one file. Texts become dictionaries, which hold each distinct text once.

    Columns with texts in a delta encoding are read without dictionaries, in a process with bounded memory.

    Args:
        file: the file.
        required, optional: its columns.
        keys: the job file's key that names a column, by the column.

    Raises:
        InvalidData: as FileRows. A column is too large above MAX_COLUMN_BYTES or MAX_COLUMN_VALUES.
    """
    if not file.is_file():
        raise InvalidData(f"no such file: {file}")
    try:
        metadata = pq.read_metadata(file)
        with pq.ParquetFile(file, read_dictionary=_texts(metadata, (*required, *optional))) as opened:
            names = opened.schema_arrow.names
            if missing := [column for column in required if column not in names]:
                raise no_columns(str(file), missing, names, keys)
            wanted = [column for column in (*required, *optional) if column in names]
            if twice := [column for column in wanted if names.count(column) > 1]:
                raise InvalidData(f"{file} has two columns {twice[0]!r}")
            _check_claim(metadata, wanted, file)
            table = _read(opened, wanted, file)
            warn_of_media(file, names)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None):  # an I/O error, which may pass; the file is not to blame
            raise
        raise InvalidData(f"{file} cannot be read as Parquet: {error}") from error
    if not len(table):
        raise InvalidData(f"{file} has no rows")
    for column in wanted:
        check_cells(table.column(column), f"column {column!r}", file)
    return table


def no_columns(
    where: str, missing: Sequence[str], names: Sequence[str], keys: Mapping[str, str]
) -> InvalidData:
    """Return the error for columns that a file lacks; it names the keys by which they are chosen."""
    found = " and ".join(dict.fromkeys(keys[column] for column in missing if column in keys))
    way_out = f". Set {found} to the name of the column that holds it" if found else ""
    return InvalidData(f"{where} has no column {list(missing)}; it has {list(names)}{way_out}")


def warn_of_media(file: Path, columns: Iterable[str]) -> None:
    """Warn if a file has columns of pictures, videos or sounds: its prompts may mean little without them."""
    if media := sorted({*MEDIA_COLUMNS}.intersection(columns)):
        logger.warning("%s: column %r is not read; messages are text only", file, media[0])


def read_whole(file: Path) -> pa.Table:
    """Read all columns of one file, of any type.

    Raises:
        InvalidData: no such file, not Parquet, or a column is too large by the file's own account.
    """
    if not file.is_file():
        raise InvalidData(f"no such file: {file}")
    try:
        with pq.ParquetFile(file) as opened:
            _check_claim(opened.metadata, opened.schema_arrow.names, file)
            return opened.read()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None):
            raise
        raise InvalidData(f"{file} cannot be read as Parquet: {error}") from error


def _texts(metadata: Any, wanted: Sequence[str]) -> list[str]:
    """Return the paths of text and bytes in the wanted columns that Arrow can read as dictionaries."""
    texts = {leaf.path for leaf in _leaves(metadata, wanted) if leaf.physical_type == "BYTE_ARRAY"}
    return sorted(texts - _unshared(metadata))


def _leaves(metadata: Any, wanted: Sequence[str]) -> list[Any]:
    """Return the Parquet leaf columns (which hold values) of the wanted columns."""
    leaves = map(metadata.schema.column, range(len(metadata.schema)))
    return [leaf for leaf in leaves if any(_is_part(leaf.path, column) for column in wanted)]


def _is_part(path: str, column: str) -> bool:
    return path == column or path.startswith(f"{column}.")


def _chunks(metadata: Any) -> Iterator[Any]:
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        yield from map(group.column, range(group.num_columns))


def _unshared(metadata: Any) -> set[str]:
    """Return the paths of text and bytes that have, in some chunk, an encoding outside SHARED."""
    texts = (chunk for chunk in _chunks(metadata) if chunk.physical_type == "BYTE_ARRAY")
    return {chunk.path_in_schema for chunk in texts if not SHARED.issuperset(chunk.encodings)}


def _check_claim(metadata: Any, wanted: Sequence[str], file: Path) -> None:
    """Refuse a file whose own metadata exceeds the limits, before unpacking any page."""
    for leaf in _leaves(metadata, wanted):
        # Equal cells compress to almost nothing, and Arrow has no dictionaries of this type.
        if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY" and leaf.length > LONGEST_NUMBER:
            raise InvalidData(
                f"{file}: column {leaf.path!r} holds bytes, {leaf.length:,} in a cell; write them as text"
            )
    claims: dict[str, tuple[int, int]] = {}  # path to bytes and values
    for chunk in _chunks(metadata):
        num_bytes, num_values = claims.get(chunk.path_in_schema, (0, 0))
        num_bytes = num_bytes + chunk.total_uncompressed_size
        num_values = num_values + chunk.num_values
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
        f"{MAX_COLUMN_VALUES:,} values are read from one file: split it"
    )


def _read(opened: Any, wanted: Sequence[str], file: Path) -> pa.Table:
    """Read the wanted columns. Raises InvalidData if one is too large."""
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
    """Read columns one row group at a time. Raises InvalidData once a column is too large."""
    # Not schema_arrow.empty_table(): Arrow makes none of its JSON type within a list or struct.
    groups = [opened.read_row_groups([], columns=wanted).select(wanted)]
    sizes = dict.fromkeys(wanted, 0)
    for at in range(opened.num_row_groups if wanted else 0):
        groups.append(opened.read_row_group(at, columns=wanted).select(wanted))
        for column in wanted:
            sizes[column] += sum(map(unpacked_bytes, groups[-1].column(column).chunks))
            if sizes[column] > MAX_COLUMN_BYTES:
                raise _too_large(file, column, f"{sizes[column]:,} bytes")
    return pa.concat_tables(groups)


def unpacked_bytes(array: Any) -> int:
    """Bytes of an array's cells if each had its own copy of its text."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return unpacked_bytes(array.storage)
    if pa.types.is_struct(kind):
        return sum(map(unpacked_bytes, array.flatten()))
    if pa.types.is_map(kind):  # a map array has no flatten
        return unpacked_bytes(array.keys) + unpacked_bytes(array.items)
    if pa.types.is_nested(kind):
        return LIST_BYTES * len(array) + unpacked_bytes(array.flatten())
    if not pa.types.is_dictionary(kind) or not _has_lengths(kind.value_type):
        return int(array.nbytes)
    lengths = pc.binary_length(array.dictionary)
    total = array.indices.nbytes
    for first in range(0, len(array), AT_ONCE):
        total += pc.sum(lengths.take(array.indices.slice(first, AT_ONCE))).as_py() or 0
    return int(total)


def _has_lengths(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        (types.is_string(kind), types.is_large_string(kind), types.is_binary(kind), types.is_large_binary(kind))
    )


def check_cells(column: pa.ChunkedArray, named: str, file: Path) -> None:
    """Refuse cells that cannot be sent: text that is not UTF-8, dates, bytes, decimals, other non-JSON types.

    Raises:
        InvalidData: such a cell; the message names file, row and column.
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
            cell = decoded(column.slice(row, 1).to_pylist()[0], column.type)
        except UnicodeDecodeError as error:
            raise InvalidData(f"{where} is not UTF-8: {error.reason} in {error.object!r:.80}") from error
        # e.g. a date outside Python's range, or text in a column of JSON that is none
        except (ValueError, OverflowError, RecursionError, pa.ArrowException) as error:
            raise InvalidData(f"{where} of {column.type} cannot be read: {error}") from error
        if found := not_json(cell, ""):
            raise InvalidData(f"{where} {found}")
    if damage is not None:
        raise InvalidData(f"{file}: {named} is damaged: {damage}") from damage


def _is_plain(kind: pa.DataType, levels: int) -> bool:
    """True if this type holds only lists, dicts, text, numbers and booleans, nested at most `levels` deep."""
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


def not_json(value: Any, path: str, levels: int = MAX_DEPTH) -> str:
    """Describe the first value of a cell that JSON cannot represent, and its place; empty if there is none."""
    if isinstance(value, dict | list) and not levels:
        return f"nests deeper than {MAX_DEPTH} levels"
    if isinstance(value, dict):
        below = ((f"{path}.{key}", inner) for key, inner in value.items())
        return next(filter(None, (not_json(inner, at, levels - 1) for at, inner in below)), "")
    if isinstance(value, list):
        return next(filter(None, (not_json(inner, f"{path}[]", levels - 1) for inner in value)), "")
    if value is None or type(value) in (str, int, float, bool):
        return ""
    at = f"(in it {path.removeprefix('.')}) " * bool(path)
    return f"{at}holds a {type(value).__name__}, {value!r:.80}; write it as text or a number"


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema | None = None) -> Path:
    """Write rows as one Parquet file, atomically. Missing directories are created.

    Args:
        file: the file.
        rows: dicts; with a schema, ROWS_AT_ONCE are in memory at once.
        schema: of the rows; None: found from all rows.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".unfinished")
    if schema is None:
        pq.write_table(pa.Table.from_pylist(list(rows)), unfinished)
    else:
        rows = iter(rows)
        with pq.ParquetWriter(unfinished, schema) as writer:
            while some := list(islice(rows, ROWS_AT_ONCE)):
                writer.write_table(pa.Table.from_pylist(some, schema))
    unfinished.replace(file)
    return file
