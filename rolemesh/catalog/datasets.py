"""Data sets: where rows come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rolemesh.catalog.catalog import Catalog, Declaration


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(Declaration):
    """A data set: `dataset(files, config, split) -> rows`.

    `files` are data.train_files or data.val_files, `config` is the section `data`, `split` is "train" or "val".
    The rows are a sequence of dicts in the layout that rolemesh/data/files.py describes.

    Args:
        reads_files: the job must name files.
    """

    kind: ClassVar[str] = "data set"

    reads_files: bool = False

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("files", "config", "split"), ()


DATASETS = Catalog(
    DatasetSpec,
    DatasetSpec(
        name="parquet",
        code="rolemesh.data.files:read_rows",
        reads_files=True,
        meaning="Parquet and JSON Lines files in verl's layout",
    ),
)
