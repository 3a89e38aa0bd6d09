"""Directories that a role opens because a caller names them: at or below a root of its own, through no link.

A path that comes over a wire is only a wish. It is compared with the roots by its text alone, before the disk
is touched, so the answer to a foreign path says nothing about that path. What remains is opened one directory
after another by descriptor (`openat`), and no symbolic link is followed. Libraries that want a path get the
descriptor's. So it does not help to exchange a directory for a link while a call runs.

Not covered: another process of the same user that writes to the run directory, and places a link in a directory
while it is being filled. A pod that runs foreign code should have the run directory read-only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from rolemesh.config import JobConfig

DESCRIPTORS = Path("/proc/self/fd")
# On the way only the right to search is needed.
STEP = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", 0)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without waiting: a FIFO has no end to wait for.
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MAX_CHARACTERS = 4096  # of a path, as in Linux
MAX_LEVELS = 8  # of directories below a root; a checkpoint's take two, a tokenizer's templates one more
SHOWN = 200  # characters of a path in a message


class OutsideHome(PermissionError):
    """A directory that is not below a root, whatever is or is not there."""


class Home:
    """Where one role reads and writes what callers name.

    Args:
        root: the run directory. It may itself be reached by a link: its owner says where it is.
        readable: others, which are read alone.
    """

    def __init__(self, root: Path, *readable: Path) -> None:
        # As callers spell it, and where it is. Resolved once: a link that comes later is not followed.
        self._writable = {path: path.resolve() for path in (root.absolute(),)}
        self._readable = self._writable | {path.absolute(): path.resolve() for path in readable}

    @classmethod
    def of(cls, job: JobConfig) -> Home:
        """The run directory, and the checkpoint that the job resumes from, which is read alone."""
        resumed = job.trainer.resume_from_path if job.trainer.resume_mode == "resume_path" else None
        return cls(job.run_dir, *([Path(resumed)] if resumed else []))

    def free_bytes(self) -> int:
        """On the root's disk."""
        [root] = self._writable.values()
        return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free

    @contextmanager
    def reading(self, path: Path) -> Iterator[Path]:
        """The files below a directory as they are now, under their names. Each is opened once, so what takes
        its place meanwhile is not read.

        Raises:
            OutsideHome: the directory is none of ours.
            OSError: it is not there, or has something in it that is neither file nor directory.
        """
        with ExitStack() as stack:
            directory = stack.enter_context(_directory(*_place(path, self._readable)))
            if not DESCRIPTORS.is_dir():  # not Linux
                yield path
                return
            view = Path(stack.enter_context(TemporaryDirectory(prefix="rolemesh-")))
            _show(directory, view, MAX_LEVELS, stack)
            yield view

    @contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """An empty directory. When the block ends well, what was written there is on disk, everybody may read
        it, and it has replaced what had the same names in `path`, which is made if absent. Nothing else in
        `path` changes.

        Raises:
            OutsideHome: the directory is none of ours.
            OSError: it cannot be made or written to.
        """
        with _directory(*_place(path, self._writable), make=True) as target:
            name = f".new-{secrets.token_hex(8)}"
            os.mkdir(name, 0o700, dir_fd=target)
            try:
                with _opened(name, DIRECTORY, target) as fresh:
                    yield DESCRIPTORS / str(fresh) if DESCRIPTORS.is_dir() else path / name
                    _flush(fresh)
                    _replace(fresh, target)
                os.fsync(target)
            finally:
                shutil.rmtree(name, ignore_errors=True, dir_fd=target)

    @contextmanager
    def file(self, path: Path) -> Iterator[BinaryIO]:
        """One file, made if absent with its directory, to be read and written in place.

        Raises:
            OutsideHome: its directory is none of ours.
            OSError: it cannot be had, or is no file.
        """
        flags = FILE | os.O_RDWR | os.O_CREAT
        with (
            _directory(*_place(path.parent, self._writable), make=True) as directory,
            _opened(path.name, flags, directory) as descriptor,
        ):
            _check_file(descriptor, path.name)
            with open(descriptor, "r+b", closefd=False) as file:
                yield file


def _place(path: Path, roots: Mapping[Path, Path]) -> tuple[Path, tuple[str, ...]]:
    """The root that a path lies below, and the way from there. By the text alone."""
    path = path.absolute()
    text = str(path)
    if len(text) <= MAX_CHARACTERS and ".." not in path.parts and "\0" not in text:
        for named, real in roots.items():
            for root in (named, real):
                if path.is_relative_to(root) and len(parts := path.relative_to(root).parts) <= MAX_LEVELS:
                    return real, parts
    shown = repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
    known = " or ".join(str(root) for root in roots)
    raise OutsideHome(
        f"{shown} is not one of the directories in {known}; a role opens no other for a caller (they are "
        "trainer.default_local_dir and, to read, trainer.resume_from_path of its own configuration)"
    )


@contextmanager
def _directory(root: Path, parts: tuple[str, ...], make: bool = False) -> Iterator[int]:
    """Goes from the top of the file system to a directory, link by no link."""
    steps = (*root.parts[1:], *parts)
    at = os.open(root.anchor, STEP)
    try:
        for number, name in enumerate(steps, start=1):
            if make:
                _make(name, at)
            try:
                below = os.open(name, DIRECTORY if number == len(steps) else STEP, dir_fd=at)
            except NotADirectoryError:
                raise NotADirectoryError(
                    f"{name!r} in {root.anchor}{'/'.join(steps[: number - 1])} is not a directory "
                    "(links are not followed)"
                ) from None
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def _make(name: str, at: int) -> None:
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another role of the run was first
            os.mkdir(name, dir_fd=at)


@contextmanager
def _opened(name: str, flags: int, at: int) -> Iterator[int]:
    descriptor = os.open(name, flags, 0o666, dir_fd=at)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_file(descriptor: int, name: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(f"{name!r} is not a file")


def _show(directory: int, view: Path, levels: int, stack: ExitStack) -> None:
    """Gives `view` a name for each file of a directory, which leads to the file as it was opened."""
    with os.scandir(directory) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False) and levels:
            below = stack.enter_context(_opened(entry.name, DIRECTORY, directory))
            (view / entry.name).mkdir()
            _show(below, view / entry.name, levels - 1, stack)
            continue
        if not entry.is_file(follow_symlinks=False):
            raise OSError(f"{entry.name!r} is neither a file nor a directory (links are not followed)")
        file = stack.enter_context(_opened(entry.name, FILE | os.O_RDONLY, directory))
        _check_file(file, entry.name)
        (view / entry.name).symlink_to(DESCRIPTORS / str(file))


def _flush(fresh: int) -> None:
    """Puts on disk what was just written, for all to read: safetensors writes for its owner alone, and who
    reads a checkpoint in another pod is another user."""
    for _, _, names, at in os.fwalk(".", dir_fd=fresh):
        for name in names:
            with _opened(name, FILE | os.O_RDONLY, at) as file:
                os.fchmod(file, 0o644)
                os.fsync(file)
        os.fsync(at)


def _replace(fresh: int, target: int) -> None:
    """A rename follows no link: where the name is one, the link is replaced."""
    with os.scandir(fresh) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.name, ignore_errors=True, dir_fd=target)
        os.replace(entry.name, entry.name, src_dir_fd=fresh, dst_dir_fd=target)
