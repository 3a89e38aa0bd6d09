"""The file with the number of starts of a run that have reached no new checkpoint.

It has a fixed size, so a full disk does not stop the count: if there is no room for a new file, the old one is
overwritten. A file system that copies what it overwrites (ZFS, btrfs) needs room for that, too.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from rolemesh.services.controller.run.durably import write_durably

log = logging.getLogger(__name__)

SIZE = 4096  # bytes of a file, blanks included: one block of most file systems


class AttemptsFile:
    """The count of one run's starts, on disk.

    Args:
        path: of the file.
        of: identifies the run as it was started; the count of another one is dropped.
        keeps_file: to clear the file, write 0 instead of deleting it. So a later start finds a file to
            overwrite, though the disk is full by then.
    """

    def __init__(self, path: Path, of: str, *, keeps_file: bool) -> None:
        self._path = path
        self._of = of
        self._keeps_file = keeps_file
        self.starts = 0  # as last written; the file may not have been writable since

    def read(self, checkpoint: str) -> tuple[int, str]:
        """Return how many starts came since a checkpoint, and how the last one ended; 0 of another run.

        Args:
            checkpoint: the run's newest; "": none.
        """
        if not self._path.exists():
            return 0, ""
        try:
            known: dict[str, Any] = dict(json.loads(self._path.read_text(encoding="utf-8")))
            starts = int(known["starts"])
            last_error = str(known["last_error"])
            if starts < 0:
                raise ValueError(f"{starts} starts")
            if (known.get("of", ""), known["checkpoint"]) == (self._of, checkpoint):
                return starts, last_error
        except (ValueError, OverflowError, TypeError, KeyError) as error:  # OverflowError: of Infinity
            log.warning("%s cannot be read, so starts are counted from 0: %s", self._path, error)
        return 0, ""

    def write(self, checkpoint: str, starts: int, last_error: str) -> None:
        """Write the count, SIZE bytes of JSON. The end of a long error is left out.

        Raises:
            OSError: the file could be neither written anew nor overwritten.
        """
        known = {"of": self._of, "checkpoint": checkpoint, "starts": starts}
        while len(text := json.dumps(known | {"last_error": last_error}, indent=1)) >= SIZE and last_error:
            last_error = last_error[: len(last_error) * 9 // 10]
        content = f"{text:{SIZE - 1}}\n".encode()
        try:
            write_durably(self._path, content)
        except OSError as error:  # no room for a new file, but the old one needs no more
            try:
                _overwrite(self._path, content)
            except OSError:
                raise error from None
        self.starts = starts

    def clear(self, checkpoint: str) -> None:
        """Delete the file, or write 0. Raises OSError."""
        if self._keeps_file:
            with suppress(OSError):  # e.g. no room even to overwrite it, but to delete it takes none
                return self.write(checkpoint, 0, "")
        self._path.unlink(missing_ok=True)


def _overwrite(file: Path, content: bytes) -> None:
    """Replace the content of a file in its own blocks. A power failure may leave a part of each content."""
    with open(os.open(file, os.O_RDWR | os.O_NOFOLLOW), "r+b") as existing:
        existing.write(content)
        existing.truncate()  # an earlier version has written files of any size
        existing.flush()
        os.fsync(existing.fileno())
