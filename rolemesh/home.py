"""Directories that a role opens because a caller names them: at or below a root of its own, through no link.

A path that comes over a wire is only a wish. It is compared with the roots by its text alone, before the disk
is touched, so the answer to a foreign path says nothing about that path. What remains is opened one directory
after another by descriptor (`openat`), and no symbolic link is followed. Libraries that want a path get the
descriptor's. So it does not help to exchange a directory for a link while a call runs.

Everybody may read the files and directories that are made here, whatever the umask: who reads a checkpoint
in another pod is another user. The run directory itself, and what lies above it, has the mode that the umask
gives it.

Not covered: another process of the same user that writes to the run directory, and places a link in a directory
while it is being filled, or gives a file outside a second name there (a hard link, which looks like any file):
it is then read, and `Home.file` writes to it in place. Linux lets nobody make a hard link to a file that he may
not read and write (fs.protected_hardlinks). A pod that runs foreign code should have the run directory
read-only.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
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
MAX_ENTRIES = 512  # files and directories of a checkpoint: as many descriptors are open while it is read
SHOWN = 200  # characters of a path in a message
# What is written before it replaces what was there.
NEW = ".new-"
LEFT = re.compile(re.escape(NEW) + "[0-9a-f]{16}")
ABANDONED_SECONDS = 3600  # since anything last changed in it


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
        """The files below a directory as they are now, under their names, but for what is not yet whole. Each
        is opened once, so what takes its place meanwhile is not read.

        Raises:
            OutsideHome: the directory is none of ours.
            OSError: it is not there, has something in it that is neither file nor directory, or more than
                MAX_ENTRIES.
        """
        with ExitStack() as stack:
            directory = stack.enter_context(_directory(*_place(path, self._readable)))
            if not DESCRIPTORS.is_dir():  # not Linux
                yield path
                return
            view = Path(stack.enter_context(TemporaryDirectory(prefix="rolemesh-")))
            _show(directory, view, MAX_LEVELS, stack, MAX_ENTRIES)
            yield view

    @contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """An empty directory. When the block ends well, what was written there is on disk, everybody may read
        it, and it has replaced what had the same names in `path`, which is made if absent. Nothing else in
        `path` changes, but what a writer that was killed an hour ago or earlier has left there goes.

        Raises:
            OutsideHome: the directory is none of ours.
            OSError: it cannot be made or written to, or more than MAX_ENTRIES were written.
        """
        with _directory(*_place(path, self._writable), make=True) as target:
            _sweep(target)
            name, fresh = _new(target)
            try:
                yield DESCRIPTORS / str(fresh) if DESCRIPTORS.is_dir() else path / name
                _flush(fresh)
                _replace(fresh, target)
                os.fsync(target)
            finally:
                shutil.rmtree(name, ignore_errors=True, dir_fd=target)
                os.close(fresh)

    @contextmanager
    def file(self, path: Path) -> Iterator[BinaryIO]:
        """One file, made if absent with its directory, to be read and written in place.

        Raises:
            OutsideHome: its directory is none of ours.
            OSError: it cannot be had, or is no file.
        """
        parent = _place(path.parent, self._writable)
        _check_names((path.name,))
        with _directory(*parent, make=True) as directory, ExitStack() as stack:
            try:
                made = FILE | os.O_RDWR | os.O_CREAT | os.O_EXCL
                descriptor = stack.enter_context(_opened(path.name, made, directory))
                os.fchmod(descriptor, 0o644)
            except FileExistsError:
                descriptor = stack.enter_context(_opened(path.name, FILE | os.O_RDWR, directory))
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
                    _check_names(parts)
                    return real, parts
    shown = repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")
    known = " or ".join(str(root) for root in roots)
    raise OutsideHome(
        f"{shown} is not one of the directories in {known}; a role opens no other for a caller (they are "
        "trainer.default_local_dir and, to read, trainer.resume_from_path of its own configuration)"
    )


def _check_names(parts: tuple[str, ...]) -> None:
    for name in parts:
        if name.startswith(NEW) or not name.isprintable():
            raise OutsideHome(
                f"{name!r:.{SHOWN}} is no name for a directory or a file of a run: it begins with {NEW!r}, as "
                "what is not yet whole does, or has a character that cannot be printed"
            )


@contextmanager
def _directory(root: Path, parts: tuple[str, ...], make: bool = False) -> Iterator[int]:
    """Goes from the top of the file system to a directory, link by no link."""
    steps = (*root.parts[1:], *parts)
    at = os.open(root.anchor, STEP)
    try:
        for number, name in enumerate(steps, start=1):
            ours = make and _make(name, at) and number >= len(root.parts)
            try:
                below = os.open(name, DIRECTORY if ours or number == len(steps) else STEP, dir_fd=at)
            except NotADirectoryError:
                raise NotADirectoryError(
                    f"{name!r} in {root.anchor}{'/'.join(steps[: number - 1])} is not a directory "
                    "(links are not followed)"
                ) from None
            os.close(at)
            at = below
            if ours:
                os.fchmod(at, 0o755)
        yield at
    finally:
        os.close(at)


def _make(name: str, at: int) -> bool:
    """Makes a directory; False: something has that name."""
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another role of the run was first
            os.mkdir(name, dir_fd=at)
            return True
    return False


def _new(target: int) -> tuple[str, int]:
    """A directory that its writer holds a lock on: its name and a descriptor."""
    while True:
        name = f"{NEW}{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=target)
        # Another writer, whose clock is an hour ahead, may have removed it between the two lines.
        with suppress(FileNotFoundError):
            fresh = os.open(name, DIRECTORY, dir_fd=target)
            with suppress(OSError):  # held by who removes it; or a file system without locks: nothing is swept
                fcntl.flock(fresh, fcntl.LOCK_EX)
            if os.fstat(fresh).st_nlink:
                return name, fresh
            os.close(fresh)


def _sweep(target: int) -> None:
    """Removes what killed writers have left: the lock of a living one cannot be had.

    Some file systems keep locks to each node (NFS with local_lock, some of FUSE), and a living writer of
    another node looks dead there. So what changed within the last hour stays too.
    """
    with os.scandir(target) as entries:
        found = [entry.name for entry in entries if LEFT.fullmatch(entry.name)]
    for name in found:
        with suppress(OSError), _opened(name, DIRECTORY, target) as left:  # a living writer's, or already gone
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - _changed(left) < ABANDONED_SECONDS:
                continue
            shutil.rmtree(name, ignore_errors=True, dir_fd=target)


def _changed(directory: int) -> float:
    """When a directory, or anything in it, was last written."""
    last = os.fstat(directory).st_mtime
    for _, directories, names, at in os.fwalk(".", dir_fd=directory):
        times = (os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime for name in (*directories, *names))
        last = max([last, *times])
    return last


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


def _check_entries(left: int) -> None:
    if left < 0:
        raise OSError(f"more than {MAX_ENTRIES} files and directories, which is no checkpoint")


def _show(directory: int, view: Path, levels: int, stack: ExitStack, most: int) -> int:
    """Gives `view` a name for each file of a directory, which leads to the file as it was opened.

    Args:
        most: entries that may be shown. Returns how many of them are left.
    """
    with os.scandir(directory) as entries:
        # What is not yet whole, or was left by a killed writer, is none of it.
        found = list(islice((entry for entry in entries if not LEFT.fullmatch(entry.name)), most + 1))
    most -= len(found)
    _check_entries(most)
    for entry in found:
        if entry.is_dir(follow_symlinks=False) and levels:
            below = stack.enter_context(_opened(entry.name, DIRECTORY, directory))
            (view / entry.name).mkdir()
            most = _show(below, view / entry.name, levels - 1, stack, most)
            continue
        if not entry.is_file(follow_symlinks=False):
            raise OSError(f"{entry.name!r} is neither a file nor a directory (links are not followed)")
        file = stack.enter_context(_opened(entry.name, FILE | os.O_RDONLY, directory))
        _check_file(file, entry.name)
        (view / entry.name).symlink_to(DESCRIPTORS / str(file))
    return most


def _flush(fresh: int) -> None:
    """Puts on disk what was just written, for all to read: safetensors writes for its owner alone."""
    most = MAX_ENTRIES
    for _, directories, names, at in os.fwalk(".", dir_fd=fresh):
        most -= len(directories) + len(names)
        _check_entries(most)
        for name in names:
            with _opened(name, FILE | os.O_RDONLY, at) as file:
                os.fchmod(file, 0o644)
                os.fsync(file)
        os.fchmod(at, 0o755)
        os.fsync(at)


def _replace(fresh: int, target: int) -> None:
    """A rename follows no link: where the name is one, the link is replaced."""
    with os.scandir(fresh) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.name, ignore_errors=True, dir_fd=target)
        os.replace(entry.name, entry.name, src_dir_fd=fresh, dst_dir_fd=target)
