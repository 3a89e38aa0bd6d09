"""The engine's own directory of weights, in a parent directory that the servers can also read."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from safetensors.torch import save_file
from torch import Tensor

from rolemesh.errors import InvalidConfig, WeightsUnavailable, unreadable
from rolemesh.home import lock

PREFIX = "rolemesh-"


class WeightsFolder:
    """Each version is a directory with one safetensors file.

    Servers may run as another user, so every user who can enter the parent can read the versions. The folder is
    removed when it is closed or the process ends. If the process is killed, the next engine that starts there
    removes it: a folder whose lock is free is abandoned.
    """

    def __init__(self, parent: Path) -> None:
        try:
            _remove_abandoned(parent)
            self._path, self._lock = _locked_directory(parent.resolve())
            self._removal = weakref.finalize(self, shutil.rmtree, self._path, ignore_errors=True)
        except OSError as error:
            raise unreadable(
                InvalidConfig,
                error,
                f"rollout.openai.weights_dir is {str(parent)!r}, and weights cannot be written there: {error}",
            ) from error

    def write(self, version: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write a version to a new directory.

        Raises:
            WeightsUnavailable: it cannot be written, for example because the disk is full.
        """
        own = {name: tensor.contiguous() for name, tensor in tensors.items()}
        directory = self._path
        try:
            directory = _directory(f"{version}-", self._path)
            save_file(own, directory / "model.safetensors", metadata={"format": "pt"})
            (directory / "model.safetensors").chmod(0o644)
        except Exception as error:  # safetensors raises its own type in place of OSError
            if directory != self._path:
                shutil.rmtree(directory, ignore_errors=True)
            raise WeightsUnavailable(f"version {version} cannot be written to {directory}: {error}") from error
        return directory

    def remove(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        self._removal()
        self._lock.close()


def _directory(prefix: str, parent: Path) -> Path:
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    path.chmod(0o755)
    return path


def _locked_directory(parent: Path) -> tuple[Path, IO[bytes]]:
    """Make the engine's directory, and lock it."""
    while True:
        path = _directory(PREFIX, parent)
        with ExitStack() as unfinished:
            unfinished.callback(shutil.rmtree, path, ignore_errors=True)
            file = unfinished.enter_context((path / "lock").open("wb"))
            # Another engine that starts takes it for abandoned if it comes before the lock, and removes it.
            with suppress(BlockingIOError):
                lock(file, parent)
                if os.fstat(file.fileno()).st_nlink:
                    unfinished.pop_all()
                    return path, file


def _remove_abandoned(parent: Path) -> None:
    for file in parent.glob(f"{PREFIX}*/lock"):
        try:
            opened = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # removed meanwhile, another user's, or a link
            continue
        try:
            lock(opened, parent)
            shutil.rmtree(file.parent, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(opened)
