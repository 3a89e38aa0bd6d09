"""What a caller may name lies at or below a role's roots and is reached through no link. Nothing changes but
what was written."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rolemesh.config.job import make_job
from rolemesh.errors import RolemeshError
from rolemesh.home import ABANDONED_SECONDS, MAX_ENTRIES, NEW, Home, OutsideHome
from rolemesh.services.controller.run.checkpoints import write_durably
from rolemesh.services.controller.run.profile import profiled
from rolemesh.services.controller.run.run_dir import dump, held
from rolemesh.services.rollout.engines.openai.folder import WeightsFolder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A directory of somebody else, with a key in it."""
    directory = tmp_path / "foreign"
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "named",
    [
        "{foreign}", "{root}/../foreign", "{root}/a/../../foreign", "{root}/./../foreign", "/", "/etc", "..",
        "foreign", "", "{root}2", "//{foreign}", "{root}/\0", "{root}/" + "a/" * 9, "{root}/" + "a" * 5000,
    ],
)  # fmt: skip
def test_a_foreign_path_is_refused_in_the_same_words_whether_it_is_there_or_not(
    way: Callable[[Home, Path], object], named: str, root: Path, foreign: Path
) -> None:
    path, before = Path(named.format(foreign=foreign, root=root)), state(foreign)
    answers = []
    for there in (True, False):
        if not there:
            foreign.rename(foreign.with_name("away"))
        with pytest.raises(OutsideHome, match="is not one of the directories in") as refused:
            way(Home(root), path)
        answers.append(str(refused.value))
    assert answers[0] == answers[1]
    foreign.with_name("away").rename(foreign)
    assert (state(foreign), list(root.iterdir())) == (before, [])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("link", "to", "named"),
    [("a", "foreign", "a"), ("a", "foreign", "a/below"), ("a/b", "foreign", "a/b"), ("a", "../foreign", "a"),
     ("a", "run", "a")],
)  # fmt: skip
def test_no_link_is_followed_and_nobody_learns_where_it_leads(
    way: Callable[[Home, Path], object], link: str, to: str, named: str, root: Path, foreign: Path
) -> None:
    (root / link).parent.mkdir(exist_ok=True)
    (root / link).symlink_to(to if to.startswith("..") else root.parent / to)
    before, answers = state(foreign), []
    for there in (True, False):
        if not there:
            foreign.rename(foreign.with_name("away"))
        with pytest.raises(NotADirectoryError, match=r"is not a directory \(links are not followed") as refused:
            way(Home(root), root / named)
        answers.append(str(refused.value))
    assert answers[0] == answers[1]
    foreign.with_name("away").rename(foreign)
    assert state(foreign) == before


@pytest.mark.parametrize("below", ["key", "sub/key"])
@pytest.mark.parametrize("to", ["key", "below", "nothing"])
def test_a_link_among_the_files_is_not_read_and_nobody_learns_where_it_leads(
    root: Path, foreign: Path, below: str, to: str
) -> None:
    (root / below).parent.mkdir(exist_ok=True)
    (root / below).symlink_to(foreign / to)
    with pytest.raises(OSError, match=r"^'key' is neither a file nor a directory"):
        read(Home(root), root)


def test_a_link_among_the_files_is_replaced_and_not_written_through(root: Path, foreign: Path) -> None:
    (root / "key").symlink_to(foreign / "key")
    write(Home(root), root)
    assert ((root / "key").read_text(), (root / "key").is_symlink()) == ("new", False)
    assert (foreign / "key").read_text() == "secret"
    (root / "key").unlink()
    (root / "key").symlink_to(foreign / "key")
    with pytest.raises(OSError, match="symbolic link"):
        write_in_place(Home(root), root)
    assert (foreign / "key").read_text() == "secret"


def test_only_what_was_written_changes(root: Path) -> None:
    (root / "sub").mkdir(mode=0o700)
    (root / "sub" / "key").write_text("mine")
    (root / "private").write_text("mine")
    (root / "private").chmod(0o600)
    before = {path: known for path, known in state(root).items() if path != str(root)}
    with Home(root).writing(root) as into:
        (into / "weights").write_text("new")
        (into / "weights").chmod(0o600)
        (into / "templates").mkdir()
        (into / "templates" / "one").write_text("new")
    after = state(root)
    assert {path: after[path] for path in before} == before
    assert {Path(path).name for path in after.keys() - before.keys()} == {"run", "weights", "templates", "one"}
    for name in ("weights", "templates/one"):  # who reads them elsewhere is another user
        assert stat.S_IMODE((root / name).stat().st_mode) == 0o644
    with Home(root).writing(root) as into:  # and again, over what is there
        (into / "templates").mkdir()
        (into / "templates" / "two").write_text("newer")
    assert os.listdir(root / "templates") == ["two"]


def test_a_failed_write_leaves_the_directory_as_it_was(root: Path) -> None:
    (root / "key").write_text("mine")
    before = state(root / "key")

    def interrupted() -> None:
        with Home(root).writing(root) as into:
            (into / "key").write_text("half")
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        interrupted()
    assert (state(root / "key"), os.listdir(root)) == (before, ["key"])


def test_to_exchange_a_directory_for_a_link_while_it_is_open_changes_nothing(root: Path, foreign: Path) -> None:
    for name in ("old", "new"):
        (root / name).mkdir()
    (root / "old" / "key").write_text("mine")
    before = state(foreign)
    with Home(root).reading(root / "old") as files, Home(root).writing(root / "new") as into:
        for name in ("old", "new"):
            (root / name).rename(root / f"{name}-moved")
            (root / name).symlink_to(foreign)
        (root / "old-moved" / "key").unlink()
        (root / "old-moved" / "key").symlink_to(foreign / "key")
        assert (files / "key").read_text() == "mine"
        (into / "key").write_text("new")
    assert state(foreign) == before
    assert (root / "new-moved" / "key").read_text() == "new"


def test_a_fifo_is_refused_and_not_waited_for(root: Path) -> None:
    os.mkfifo(root / "key")
    for way in (read, write_in_place):
        with pytest.raises(OSError, match=r"is neither a file|is not a file"):
            way(Home(root), root)


def test_the_root_may_be_reached_by_a_link_but_not_be_exchanged_for_one_later(
    root: Path, foreign: Path
) -> None:
    link = root.with_name("link")
    link.symlink_to(root)
    home = Home(link)
    write(home, link / "a")
    assert read(home, link / "a") == read(home, root / "a") == {"key": "new"}
    root.rename(root.with_name("moved"))
    root.symlink_to(foreign)
    for way in WAYS:
        with pytest.raises(NotADirectoryError):
            way(home, link / "below")


def test_the_checkpoint_to_resume_from_is_read_and_not_written(root: Path, foreign: Path) -> None:
    trainer = {"default_local_dir": str(root), "resume_from_path": str(foreign)}
    with pytest.raises(OutsideHome):
        read(Home.of(make_job({"trainer": trainer})), foreign)  # resume_mode is auto
    home = Home.of(make_job({"trainer": trainer | {"resume_mode": "resume_path"}}))
    assert read(home, foreign) == {"key": "secret"}
    for way in (write, write_in_place):
        with pytest.raises(OutsideHome):
            way(home, foreign)


def test_a_run_directory_is_made_with_what_lies_below_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "outputs" / "run")
    with pytest.raises(FileNotFoundError):
        read(home, tmp_path / "outputs" / "run")
    assert home.free_bytes() > 0
    write(home, tmp_path / "outputs" / "run" / "step" / "actor")
    assert read(home, tmp_path / "outputs" / "run") == {"step/actor/key": "new"}


def test_dumps_timelines_and_records_are_written_through_no_link(root: Path, foreign: Path) -> None:
    job = make_job(
        {"trainer": {"default_local_dir": str(root), "profile_steps": [2], "total_training_steps": 2}}
    )
    before = state(foreign)
    (root / "dumps").mkdir()
    (root / "dumps" / "2.jsonl").symlink_to(foreign / "key")
    dump([{"uid": "a"}], str(root / "dumps"), 2)
    assert (root / "dumps" / "2.jsonl").read_text() == '{"uid": "a"}\n'
    (root / "profile").symlink_to(foreign)
    with pytest.raises(NotADirectoryError), profiled(2, job):
        pass
    (root / "latest.new").symlink_to(foreign / "key")
    write_durably(root / "latest", "global_step_2\n")
    assert (root / "latest").read_text() == "global_step_2\n"
    assert state(foreign) == before


def test_a_lock_that_is_a_link_is_no_abandoned_folders(tmp_path: Path, foreign: Path) -> None:
    """Of weights for an engine's servers, in a directory that others write to."""
    (tmp_path / "weights" / "rolemesh-planted").mkdir(parents=True)
    (tmp_path / "weights" / "rolemesh-planted" / "lock").symlink_to(foreign / "key")
    before = state(foreign)
    WeightsFolder(tmp_path / "weights").close()
    assert state(foreign) == before
    assert os.listdir(tmp_path / "weights") == ["rolemesh-planted"]


KILLED = """
import os, signal, sys
from pathlib import Path
from rolemesh.home import Home

with Home(Path(sys.argv[1])).writing(Path(sys.argv[1])) as into:
    (into / "sub").mkdir()
    (into / "sub" / "key").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_files_of_a_killed_writer_go_with_the_next_write_and_those_of_a_living_one_stay(root: Path) -> None:
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


def test_files_of_a_writer_on_another_node_stay_if_its_lock_is_not_visible(root: Path) -> None:
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


def test_several_processes_fill_one_directory_and_its_writer_moves_all_of_it(root: Path, foreign: Path) -> None:
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


def test_new_files_are_readable_by_all_users_with_any_umask(tmp_path: Path) -> None:
    """All but the run directory, and what lies above it: that is the user's."""
    root = tmp_path / "outputs" / "run"
    before = os.umask(0o077)
    try:
        with Home(root).writing(root / "step" / "actor") as into:
            (into / "templates").mkdir()
            (into / "templates" / "one").write_text("new")
        with Home(root).file(root / "profile" / "one"):
            pass
    finally:
        os.umask(before)
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        "outputs": 0o700,
        "outputs/run": 0o700,
        "outputs/run/step": 0o755,
        "outputs/run/step/actor": 0o755,
        "outputs/run/step/actor/templates": 0o755,
        "outputs/run/step/actor/templates/one": 0o644,
        "outputs/run/profile": 0o755,
        "outputs/run/profile/one": 0o644,
    }


def test_a_directory_of_very_many_files_is_refused_before_descriptors_run_out(root: Path) -> None:
    (root / "sub").mkdir()
    for number in range(MAX_ENTRIES - 1):
        (root / "sub" / str(number)).touch()
    assert len(read(Home(root), root)) == MAX_ENTRIES - 1
    (root / "one").touch()
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="more than 512 files and directories, the limit for a checkpoint"):
        read(Home(root), root)

    def too_many() -> None:
        with Home(root).writing(root / "other") as into:
            for number in range(MAX_ENTRIES + 1):
                (into / str(number)).touch()

    with pytest.raises(OSError, match="more than 512 files and directories"):
        too_many()
    assert list((root / "other").iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("name", ["a\nb", "step\n", ".new-0123456789abcdef", ".new-", "a\x1b[2J", "a\u202eb"])
@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_no_run_gives_is_refused(
    way: Callable[[Home, Path], object], name: str, root: Path
) -> None:
    for path in (root / name, root / name / "below"):
        with pytest.raises(OutsideHome, match="is no name for a directory or a file of a run") as error:
            way(Home(root), path)
        assert str(error.value).isprintable()
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
@pytest.mark.parametrize("enter", [lambda path: held(path).__enter__(), WeightsFolder])
def test_a_file_system_without_locks_is_named_with_the_mount_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, enter: Callable[[Path], object]
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RolemeshError, match=f"{tmp_path} is on a file system without locks .*option flock"):
        enter(tmp_path)
