"""The files of a generation: its parts, each written whole, and the output, written from all of them.

OUTPUT.parts/ has the settings, one Parquet file for each part, and the logs of the role's processes. A command
that was interrupted, at whatever moment, finds the parts that are complete, and makes the others. A row's bits
do not depend on the rows beside it, so the output has the bits of a generation that was never interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rolemesh.errors import InvalidConfig, RolemeshError
from rolemesh.services.controller.run.durably import write_durably

PROMPTS_PER_PART = 64
PROMPTS_PER_GROUP = 4096  # of the output's row groups, at least; they are held in memory while it is written
DIGEST = b"rolemesh.generate"  # the output's metadata: which settings and which prompts made it
SETTINGS = "settings.json"


class Parts:
    """The parts of one output.

    Args:
        output: the output file.
        settings: everything on which the output's bits depend, by key.
        num_prompts: number of rows of the output.
        size: prompts of a part.
        log_probs: whether log-probabilities are written.
    """

    def __init__(
        self, output: Path, settings: Mapping[str, Any], num_prompts: int, size: int, log_probs: bool
    ) -> None:
        self.output = output
        self.folder = output.with_name(output.name + ".parts")
        self.log_probs = log_probs
        text = json.dumps({**settings, "--log-probs": log_probs}, sort_keys=True)
        self._settings: dict[str, Any] = json.loads(text) | {"data.val_batch_size (prompts of a part)": size}
        self._digest = hashlib.sha256(text.encode()).hexdigest().encode()
        self._num_prompts = num_prompts
        self._size = size

    def is_complete(self) -> bool:
        """Return whether the output exists, made with these settings.

        Raises:
            InvalidConfig: it is something else.
        """
        if not self.output.exists():
            return False
        try:
            metadata = pq.read_schema(self.output).metadata or {}
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None):  # an I/O error, which may pass; the file may be ours
                raise
            metadata = {}
        if metadata.get(DIGEST) == self._digest:
            return True
        raise InvalidConfig(
            f"{self.output} exists, and was not made by these settings and prompts; name another --output, or "
            "move it away"
        )

    def begin(self) -> None:
        """Make the folder, or go on with the one of an interrupted command. The caller holds its lock.

        Raises:
            InvalidConfig: it has parts of other settings; the message names them.
        """
        path = self.folder / SETTINGS
        if path.exists():
            theirs = json.loads(path.read_text(encoding="utf-8"))
            keys = sorted(theirs.keys() | self._settings.keys())
            differing = [key for key in keys if theirs.get(key) != self._settings.get(key)]
            if differing:
                said = ", ".join(
                    f"{key} was {_shown(theirs.get(key))} and is {_shown(self._settings.get(key))}"
                    for key in differing
                )
                raise InvalidConfig(
                    f"{self.folder} has parts that were generated otherwise: {said}; restore these, name "
                    "another --output, or remove the folder"
                )
        else:
            self._write(path, json.dumps(self._settings, indent=1, ensure_ascii=False).encode() + b"\n")

    def prompts_of(self, number: int) -> range:
        """Return the positions of a part's prompts."""
        return range(number * self._size, min((number + 1) * self._size, self._num_prompts))

    def missing(self) -> list[int]:
        """Return the parts that are to be made, in their order."""
        return [number for number in range(self._num_parts) if not self._file(number).exists()]

    def num_kept(self) -> int:
        """Return the number of prompts whose responses are written."""
        missing = sum(len(self.prompts_of(number)) for number in self.missing())
        return self._num_prompts - missing

    def write(self, number: int, table: pa.Table) -> None:
        """Write a part: wholly, or not at all.

        Raises:
            RolemeshError: it cannot be written, as on a full disk. Other parts are kept.
        """
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        self._write(self._file(number), sink.getvalue().to_pybytes())

    def finish(self, input_rows: pa.Table) -> None:
        """Write the output: the input rows, and the responses beside them. Remove the parts.

        Raises:
            RolemeshError: it cannot be written, as on a full disk. All parts are kept.
        """
        unfinished = self.folder / "output.unfinished"
        responses = pq.read_schema(self._file(0))
        schema = pa.schema([*input_rows.schema, *responses], metadata=(input_rows.schema.metadata or {}))
        schema = schema.with_metadata({**(schema.metadata or {}), DIGEST: self._digest})
        try:
            with pq.ParquetWriter(unfinished, schema) as writer:
                for numbers in _in_groups(range(self._num_parts), -(-PROMPTS_PER_GROUP // self._size)):
                    first = self.prompts_of(numbers[0]).start
                    end = self.prompts_of(numbers[-1]).stop
                    made = pa.concat_tables([pq.ParquetFile(self._file(number)).read() for number in numbers])
                    rows = [*input_rows.slice(first, end - first).columns, *made.columns]
                    writer.write_table(pa.table(rows, schema=schema).combine_chunks())
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(self.output)
        except OSError as error:
            raise self._not_written(self.output, error) from error
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _num_parts(self) -> int:
        return -(-self._num_prompts // self._size)

    def _file(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.parquet"

    def _write(self, path: Path, content: bytes) -> None:
        try:
            write_durably(path, content)
        except OSError as error:
            raise self._not_written(path, error) from error

    def _not_written(self, path: Path, error: OSError) -> RolemeshError:
        return RolemeshError(
            f"{path} cannot be written: {error.strerror or error}. {self.num_kept()} of {self._num_prompts} "
            f"prompts are kept in {self.folder}; make room, and repeat the command, which goes on from there"
        )


def _in_groups(numbers: range, size: int) -> list[range]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value!r:.80}"
