"""Loads the rows of a data set: files, or rows that a user's data set returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

from rolemesh.catalog.catalog import BUILT_IN
from rolemesh.catalog.datasets import DatasetSpec
from rolemesh.config.data import DataConfig
from rolemesh.data.files import FileRows, keys_of_columns, read_answered_rows, without_fill_ins
from rolemesh.data.parquet import no_columns
from rolemesh.errors import InvalidData
from rolemesh.hub import data_file

Layout = Literal["prompts", "bare prompts", "responses", "pairs"]


class RowSource(Protocol):
    """A sequence of rows in the layout of rolemesh/data/files.py."""

    def __len__(self) -> int: ...

    def rows(self, positions: Iterable[int]) -> list[dict[str, Any]]:
        """Return the rows at these positions. The caller may modify them."""
        ...

    def where(self, row: int) -> str:
        """Name a row in messages."""
        ...


class GivenRows:
    """Rows that a user's data set returned.

    Args:
        rows: any sequence of dicts.
        source: the data set.
        required: columns that every row must have.
        keys: the job file's key that names a column, by the column.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        source: DatasetSpec,
        required: Sequence[str],
        keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._rows = rows
        self._source = source
        self._required = tuple(required)
        self._keys = keys

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, positions: Iterable[int]) -> list[dict[str, Any]]:
        """Return the rows at these positions.

        Raises:
            InvalidData: a row is not a dict, or lacks a column.
        """
        return [self._checked(position) for position in positions]

    def where(self, row: int) -> str:
        return f"data set {self._source.name}, row {row}"

    def _checked(self, position: int) -> dict[str, Any]:
        with self._source.errors_named():
            row = self._rows[position]
        if not isinstance(row, Mapping):
            raise InvalidData(f"{self.where(position)} should be a dict; it is {row!r:.200}")
        if missing := [column for column in self._required if column not in row]:
            raise no_columns(self.where(position), missing, sorted(row), self._keys)
        return without_fill_ins(row)  # a data set may be a table of Arrow's itself


def load_rows(
    files: Sequence[str | Path], config: DataConfig, split: str, layout: Layout = "prompts"
) -> RowSource:
    """Load the rows of data.dataset. Files of the Hugging Face Hub are read from its cache.

    Args:
        files, config, split: as a data set takes them.
        layout: what rows have: prompts with the columns that score responses, prompts alone, responses, or
            pairs of responses.

    Raises:
        InvalidData: there are none, or they cannot be read.
    """
    files = [data_file(file) for file in files]
    if layout == "bare prompts" and config.source.origin == BUILT_IN:
        return FileRows(files, (config.prompt_key,), ("agent_name",), keys_of_columns(config))
    if layout != "prompts" and config.source.origin == BUILT_IN:
        return read_answered_rows(files, config, layout)
    with config.source.errors_named():
        rows = config.source.load()(files, config, split, **config.options)
    if hasattr(rows, "rows") and hasattr(rows, "where"):  # a DataFrame of pandas has a `where` alone
        source: RowSource = rows
        return source
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise InvalidData(
            f"data set {config.dataset} should return a sequence of rows; it returned {type(rows).__name__}"
        )
    if not len(rows):
        way_out = "; or set trainer.val_before_train to false and trainer.test_freq to -1" * (split == "val")
        raise InvalidData(f"data set {config.dataset} returned no rows for split {split!r}{way_out}")
    scoring = (config.reward_fn_key, config.reward_model_key) if layout == "prompts" else ()
    required = (config.prompt_key, *scoring) if layout in ("prompts", "bare prompts") else ()
    return GivenRows(rows, config.source, required, keys_of_columns(config))
