"""Files of writers: those of a killed one are deleted and never read, those of a living one stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from homes import foreign_directory, read, state, write

from rolemesh.home import ABANDONED_SECONDS, MAX_ENTRIES, NEW, Home, OutsideHome


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return foreign_directory(tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from rolemesh.home import Home

with Home(Path(sys.argv[1])).writing(Path(sys.argv[1])) as into:
    (into / "sub").mkdir()
    (into / "sub" / "key").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_write_removes_files_of_killed_but_not_of_live_writers(root: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(root)], check=False)
    assert killed.returncode == -signal.SIGKILL
    [left] = root.iterdir()
    aged(left)
    (root / ".new-mine").mkdir()  # no name of ours
    with Home(root).writing(root) as first:
        (first / "one").write_text("1")
        assert not left.exists()
        write(Home(root), root)
        (first / "two").write_text("2")
    assert read(Home(root), root) == {"one": "1", "two": "2", "key": "new"}
    assert (root / ".new-mine").is_dir()


def aged(left: Path, *, but: str = "") -> None:
    """As if all of it had last changed an hour ago, but for one file."""
    for path in (left, *left.rglob("*")):
        if path.name != but:
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - ABANDONED_SECONDS))


def test_files_of_a_writer_with_an_invisible_lock_are_kept(root: Path) -> None:
    """No lock here, and the one file that it writes is new."""
    theirs = root / ".new-0123456789abcdef"
    (theirs / "sub").mkdir(parents=True)
    (theirs / "sub" / "key").write_text("half")
    (theirs / "sub" / "other").write_text("whole")
    aged(theirs, but="key")
    write(Home(root), root)
    assert (theirs / "sub" / "key").read_text() == "half"
    aged(theirs)
    write(Home(root), root)
    assert not theirs.exists()


def test_files_of_a_killed_writer_are_no_part_of_a_checkpoint(root: Path) -> None:
    """Neither read nor counted, at any level, nor is it looked into."""
    write(Home(root), root / "actor")
    for number, directory in enumerate((root, root / "actor")):
        left = directory / f".new-{number:016x}"
        left.mkdir()
        for part in range(MAX_ENTRIES):
            (left / str(part)).touch()
        (left / "link").symlink_to(root)
    assert read(Home(root), root) == {"actor/key": "new"}


def test_a_writer_moves_a_directory_filled_by_several_processes(root: Path, foreign: Path) -> None:
    home, other = Home(root), Home(root)
    with home.writing(root / "saved") as into:
        name = Path(os.path.realpath(into)).name
        with other.joining(root / "saved", name) as same:
            (same / "theirs").write_text("1")
        (into / "ours").write_text("2")
    assert read(home, root / "saved") == {"theirs": "1", "ours": "2"}
    (root / "saved" / (NEW + "0" * 16)).symlink_to(foreign)
    for path, wrong in [(foreign, name), (root, "saved"), (root, "../foreign")]:
        with pytest.raises(OutsideHome), other.joining(path, wrong):
            pass
    with pytest.raises(OSError, match="directory"), other.joining(root / "saved", NEW + "0" * 16):
        pass
    with pytest.raises(FileNotFoundError), other.joining(root / "saved", name):
        pass


def test_the_target_of_a_link_with_a_writers_name_is_not_deleted(root: Path, foreign: Path) -> None:
    before = state(foreign)
    (root / ".new-0123456789abcdef").symlink_to(foreign)
    write(Home(root), root)
    assert state(foreign) == before
