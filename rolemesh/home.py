"""Opens directories that callers name, only at or below a role's own roots, and never through a symbolic link.

A path from a caller is untrusted. It is first compared with the roots as text, before the disk is touched, so
the answer to a foreign path reveals nothing about that path. Then its directories are opened one after another
by descriptor (`openat`), and no symbolic link is followed. Libraries that need a path get the descriptor's
path. So replacing a directory by a link during a call has no effect.

Files and directories created here are readable by all users, whatever the umask, because a checkpoint's reader
in another pod is another user. The run directory itself and its parents get their mode from the umask.

Not covered: another process of the same user with write access to the run directory. It can place a link in a
directory that is being filled. Or it can create a hard link to an outside file. Such a link looks like any
file, so it is read, and `Home.file` writes to it in place. Linux forbids hard links to files that the user may
not read and write (fs.protected_hardlinks). Give a pod that runs foreign code only read access to the run
directory.
"""

from __future__ import annotations

import errno
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
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from rolemesh.errors import RolemeshError

if TYPE_CHECKING:  # imports pydantic; prepare_lock.py must start without waiting for it
    from rolemesh.config import JobConfig

DESCRIPTORS = Path("/proc/self/fd")
# Flags for intermediate directories, which need only search permission.
STEP = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", 0)
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO would otherwise wait for its other end.
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
MAX_CHARACTERS = 4096  # characters of a path, as in Linux
MAX_LEVELS = 8  # directories below a root; a checkpoint has two levels, a tokenizer's templates one more
MAX_ENTRIES = 512  # files and directories in a checkpoint; as many descriptors are open while it is read
SHOWN = 200  # characters of a path in a message
# Prefix of temporary directories: new files are written there before they replace the old ones.
NEW = ".new-"
LEFT = re.compile(re.escape(NEW) + "[0-9a-f]{16}")
ABANDONED_SECONDS = 3600  # time since the last change in a temporary directory after which it may be removed

NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # of flock


class OutsideHome(PermissionError):
    """The directory is not at or below a root, whether or not it exists."""


class Home:
    """The directories that one role reads and writes for its callers.

    Args:
        root: the run directory. Its own path may contain links, because the role's owner chose it.
        readable: further directories, only for reading.
    """

    def __init__(self, root: Path, *readable: Path) -> None:
        # The path as callers spell it, and its real path. Resolved once, so that later links are not followed.
        self._writable = {path: path.resolve() for path in (root.absolute(),)}
        self._readable = self._writable | {path.absolute(): path.resolve() for path in readable}

    @classmethod
    def of(cls, job: JobConfig) -> Home:
        """Return the home of a job: its run directory, and read-only the checkpoint that it resumes from."""
        resumed = job.trainer.resume_from_path if job.trainer.resume_mode == "resume_path" else None
        return cls(job.run_dir, *([Path(resumed)] if resumed else []))

    def free_bytes(self) -> int:
        """Return the free bytes of the disk with the run directory."""
        [root] = self._writable.values()
        return shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free

    @contextmanager
    def reading(self, path: Path) -> Iterator[Path]:
        """Provide a directory with links to the finished files below `path`, as they are now.

        Each file is opened once, at the start. So a file that replaces one in the meantime is not read. On
        systems without /proc/self/fd the directory is `path` itself.

        Raises:
            OutsideHome: the directory is not at or below a root.
            OSError: it does not exist, contains something other than files and directories, or more than
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
        """Provide an empty directory whose content replaces entries of the same names in `path` at the end.

        If the block ends without an error, the new files are flushed to disk, made readable by all users, and
        moved to `path`, which is created if missing. Nothing else in `path` changes, except that leftovers of a
        writer killed an hour ago or earlier are removed.

        Raises:
            OutsideHome: the directory is not at or below the run directory.
            OSError: it cannot be created or written to, or more than MAX_ENTRIES were written.
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
    def joining(self, path: Path, name: str) -> Iterator[Path]:
        """Provide the directory that another process of the role fills with `writing`.

        Args:
            path: the path that the other process has given to `writing`.
            name: of the unfinished directory in it.

        Raises:
            OutsideHome: the directory is not at or below the run directory, or not an unfinished one.
            OSError: it cannot be opened.
        """
        if not LEFT.fullmatch(name):
            raise OutsideHome(f"{name!r:.{SHOWN}} is not the name of an unfinished directory")
        with _directory(*_place(path, self._writable)) as target, _opened(name, DIRECTORY, target) as fresh:
            yield DESCRIPTORS / str(fresh) if DESCRIPTORS.is_dir() else path / name

    @contextmanager
    def file(self, path: Path) -> Iterator[BinaryIO]:
        """Open a file for reading and writing in place; create it and its directory if missing.

        Raises:
            OutsideHome: its directory is not at or below the run directory.
            OSError: it cannot be opened, or is not a regular file.
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


def lock(file: IO[Any] | int, directory: Path) -> None:
    """Take the exclusive lock of an open file in a directory. It is released when the file is closed.

    Args:
        file: the open file, or its descriptor.
        directory: named in the error.

    Raises:
        BlockingIOError: another process holds it.
        RolemeshError: the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise RolemeshError(
            f"{directory} is on a file system without locks (flock: {error.strerror}), which keep two "
            "processes from writing there. Mount it with locks: Lustre with the option flock; NFS with vers=4, "
            "or with nolock if one machine alone uses it. Or choose another directory"
        ) from error


def _place(path: Path, roots: Mapping[Path, Path]) -> tuple[Path, tuple[str, ...]]:
    """Find the root that contains a path, and the names from there, by text alone. Raises OutsideHome."""
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
        f"{shown} is not one of the directories in {known}; a role opens no other for a caller (these are "
        "trainer.default_local_dir and, for reading, trainer.resume_from_path of its own configuration)"
    )


def _check_names(parts: tuple[str, ...]) -> None:
    for name in parts:
        if name.startswith(NEW) or not name.isprintable():
            raise OutsideHome(
                f"{name!r:.{SHOWN}} is no name for a directory or a file of a run: it begins with {NEW!r}, the "
                "prefix of unfinished directories, or has an unprintable character"
            )


@contextmanager
def _directory(root: Path, parts: tuple[str, ...], *, make: bool = False) -> Iterator[int]:
    """Open a directory, from the top of the file system down, without following links."""
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


def _make(name: str, parent: int) -> bool:
    """Create a directory; False if the name already exists."""
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another role of the run created it first
            os.mkdir(name, dir_fd=parent)
            return True
    return False


def _new(target: int) -> tuple[str, int]:
    """Create a temporary directory, lock it, and return its name and descriptor."""
    while True:
        name = f"{NEW}{secrets.token_hex(8)}"
        os.mkdir(name, 0o700, dir_fd=target)
        # Another writer, whose clock is an hour ahead, may remove it before it is open and locked.
        with suppress(FileNotFoundError):
            fresh = os.open(name, DIRECTORY, dir_fd=target)
            with suppress(OSError):  # a file system without locks, on which nothing is swept either
                fcntl.flock(fresh, fcntl.LOCK_EX)
            if os.fstat(fresh).st_nlink:
                return name, fresh
            os.close(fresh)


def _sweep(target: int) -> None:
    """Remove the temporary directories of killed writers; a living writer holds its directory's lock.

    Some file systems keep locks local to a node (NFS with local_lock, some of FUSE), so a living writer on
    another node looks dead. Therefore directories that changed within the last hour stay too.
    """
    with os.scandir(target) as entries:
        found = [entry.name for entry in entries if LEFT.fullmatch(entry.name)]
    for name in found:
        with suppress(OSError), _opened(name, DIRECTORY, target) as left:  # in use, or already gone
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - _changed(left) < ABANDONED_SECONDS:
                continue
            shutil.rmtree(name, ignore_errors=True, dir_fd=target)


def _changed(directory: int) -> float:
    """Return the time of the last modification of a directory or anything in it."""
    last = os.fstat(directory).st_mtime
    for _, directories, names, at in os.fwalk(".", dir_fd=directory):
        times = (os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime for name in (*directories, *names))
        last = max([last, *times])
    return last


@contextmanager
def _opened(name: str, flags: int, parent: int) -> Iterator[int]:
    descriptor = os.open(name, flags, 0o666, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_file(descriptor: int, name: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(f"{name!r} is not a file")


def _check_entries(left: int) -> None:
    if left < 0:
        raise OSError(f"more than {MAX_ENTRIES} files and directories, the limit for a checkpoint")


def _show(directory: int, view: Path, levels: int, stack: ExitStack, most: int) -> int:
    """Create a link in `view` for each file of a directory; it points to the open file's descriptor.

    Args:
        directory: descriptor of the directory.
        view: where to create the links.
        levels: how many levels of directories may follow.
        stack: closes the descriptors.
        most: how many entries may be shown.

    Returns:
        How many entries of `most` are left.
    """
    with os.scandir(directory) as entries:
        # Skip temporary directories: they are unfinished, or left by a killed writer.
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
    """Flush new files to disk and make them readable by all users: safetensors makes its files private."""
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
    """Move new entries over the old ones. A rename follows no link: an old link is itself replaced."""
    with os.scandir(fresh) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.name, ignore_errors=True, dir_fd=target)
        os.replace(entry.name, entry.name, src_dir_fd=fresh, dst_dir_fd=target)
