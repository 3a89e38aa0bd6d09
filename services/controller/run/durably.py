"""Writes a file so that a power failure leaves the old content or the new. Imports nothing that takes time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new content, even after a power failure."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # left by a killed writer, or a link, which must not be followed
    with named(path), new.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a directory, i.e. the names in it, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file in an error of the system, which names none when a write or a flush fails."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not of the system; its own words say more
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
