"""The pods of a job prepare one at a time. One that waits for its turn ends as soon as it is asked to."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from namespaces import as_container, needs_namespaces, terminate

from rolemesh.errors import RolemeshError
from rolemesh.services.controller import prepare_lock
from rolemesh.services.controller.prepare_lock import locked


def test_one_waits_until_another_has_prepared_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = locked(tmp_path / "lock")

    class Ends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            first.__exit__(None, None, None)

    monkeypatch.setattr(prepare_lock, "RETRY_S", 0.0)
    monkeypatch.setattr(prepare_lock.log, "handlers", [Ends()])
    caplog.set_level(logging.INFO, prepare_lock.log.name)
    for waits in (True, False):
        if waits:
            first.__enter__()
        with locked(tmp_path / "lock"):
            assert f"waits for the lock of {tmp_path / 'lock'}" in caplog.text
            assert len(caplog.records) == 1


def test_a_lock_of_another_user_is_taken_and_is_group_writable() -> None:
    """As of two releases with users of their own on one claim."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "lock")
        with locked(file):
            assert file.stat().st_mode & 0o777 == 0o664
        Path(folder).chmod(0o777)
        file.chmod(0o444)  # its owner may not write to it, either
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            with locked(file), file.open() as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.seteuid(os.getuid())


def test_a_lock_that_nfs_gives_only_to_writers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS turns flock into a lock of the server's, which needs a file that is open for writing."""

    def refuse(file: object, operation: int) -> None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RolemeshError, match=rf"^{tmp_path}/lock belongs to another user.*chmod g\+w"):
        locked(tmp_path / "lock").__enter__()


def test_a_workspace_that_may_not_be_written_is_said_to_be_so() -> None:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError):
                locked(Path(folder, "lock")).__enter__()
        finally:
            os.seteuid(os.getuid())
            Path(folder).chmod(0o700)


@needs_namespaces
def test_a_pod_that_waits_for_its_turn_ends_at_sigterm(tmp_path: Path) -> None:
    """Else it keeps its GPUs until it is killed: a container's command is process 1."""
    options = ("--creates=made", "--lock=lock", "--", "touch", "made")
    prepare = (sys.executable, "-m", "rolemesh", "prepare", *options)
    with locked(tmp_path / "lock"), as_container(*prepare, cwd=tmp_path, stderr=subprocess.PIPE) as waiting:
        assert waiting.stderr
        assert "waits for the lock of lock" in waiting.stderr.readline()
        terminate(waiting)
        assert waiting.wait(timeout=60) == 128 + signal.SIGTERM
    assert not (tmp_path / "made").exists()
