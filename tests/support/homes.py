"""Ways to use the directory of a role, the state of a directory, and one that belongs to somebody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rolemesh.home import Home


def foreign_directory(parent: Path) -> Path:
    """Make a directory of somebody else, with a key in it."""
    directory = parent / "foreign"
    (directory / "below").mkdir(parents=True)
    (directory / "key").write_text("secret")
    (directory / "key").chmod(0o600)
    return directory


def read(home: Home, path: Path) -> dict[str, str]:
    with home.reading(path) as files:
        return {str(p.relative_to(files)): p.read_text() for p in sorted(files.rglob("*")) if p.is_file()}


def write(home: Home, path: Path) -> None:
    with home.writing(path) as into:
        (into / "key").write_text("new")


def write_in_place(home: Home, path: Path) -> None:
    with home.file(path / "key") as file:
        file.write(b"new")


WAYS: list[Callable[[Home, Path], object]] = [read, write, write_in_place]


def state(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """All that is there: mode, time of change, content."""
    return {
        str(path): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in (directory, *directory.rglob("*"))
    }
