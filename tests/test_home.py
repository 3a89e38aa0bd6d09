"""What a caller may name lies at or below a role's roots and is reached through no link. Nothing changes but
what was written."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from homes import WAYS, foreign_directory, read, state, write, write_in_place

from rolemesh.config.base import absolute_path
from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig, RolemeshError, WeightsUnavailable
from rolemesh.home import MAX_ENTRIES, Home, OutsideHome, lock
from rolemesh.services.controller.prepare_lock import locked
from rolemesh.services.controller.run.durably import write_durably
from rolemesh.services.controller.run.profile import profiled
from rolemesh.services.controller.run.run_dir import dump, held
from rolemesh.services.rollout.engines.openai import folder
from rolemesh.services.rollout.engines.openai.folder import WeightsFolder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    return foreign_directory(tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "named",
    [
        "{foreign}", "{root}/../foreign", "{root}/a/../../foreign", "{root}/./../foreign", "/", "/etc", "..",
        "foreign", "", "{root}2", "//{foreign}", "{root}/\0", "{root}/" + "a/" * 9, "{root}/" + "a" * 5000,
    ],
)  # fmt: skip
def test_a_foreign_path_error_does_not_tell_whether_it_exists(
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
def test_a_link_among_files_is_not_read_and_its_target_not_shown(
    root: Path, foreign: Path, below: str, to: str
) -> None:
    (root / below).parent.mkdir(exist_ok=True)
    (root / below).symlink_to(foreign / to)
    with pytest.raises(OSError, match=r"^'key' is neither a file nor a directory"):
        read(Home(root), root)


def test_a_link_among_files_is_replaced_not_written_through(root: Path, foreign: Path) -> None:
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


def test_swapping_an_open_directory_for_a_link_changes_nothing(root: Path, foreign: Path) -> None:
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


def test_the_root_may_be_a_link_but_not_become_another_later(root: Path, foreign: Path) -> None:
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


def test_a_run_directory_with_dots_is_resolved_as_by_the_system(tmp_path: Path) -> None:
    """`link/..` is above the link's target, which the text alone does not say."""
    (tmp_path / "disk" / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "below")
    trainer = {"default_local_dir": f"{tmp_path}/link/../run", "profile_steps": [2], "total_training_steps": 2}
    job, run = make_job({"trainer": trainer}), tmp_path / "disk" / "run"
    assert job.run_dir == run
    write(Home.of(job), job.run_dir / "global_step_2" / "actor")
    with profiled(2, job):
        pass
    dump([{"uid": "a"}], f"{tmp_path}/link/../run/dumps", 2)
    for name in ("global_step_2/actor/key", "profile/step_2/timeline.json", "dumps/2.jsonl"):
        assert (run / name).is_file()
    linked = make_job({"trainer": {"default_local_dir": f"{tmp_path}/link/./run"}})
    assert linked.run_dir == tmp_path / "link" / "run"
    (tmp_path / "loop").symlink_to("loop")
    for name in ("loop/../run", "disk/../loop/run"):
        with pytest.raises(InvalidConfig, match=f"{name} form a loop"):
            absolute_path(f"{tmp_path}/{name}")


def test_dumps_timelines_and_records_are_written_through_no_link(
    root: Path, foreign: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make_job(
        {"trainer": {"default_local_dir": str(root), "profile_steps": [2], "total_training_steps": 2}}
    )
    before = state(foreign)
    (root / "dumps").mkdir()
    (root / "dumps" / "2.jsonl").symlink_to(foreign / "key")
    dump([{"uid": "a"}], str(root / "dumps"), 2)
    assert (root / "dumps" / "2.jsonl").read_text() == '{"uid": "a"}\n'
    (root / "profile").symlink_to(foreign)
    with profiled(2, job):
        pass
    assert "timeline.json was not written: " in caplog.text
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


def test_a_folder_that_another_engine_removed_is_created_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one starts before this one has locked its folder."""
    others: list[WeightsFolder] = []

    def late(file: Any, directory: Path) -> None:
        monkeypatch.setattr(folder, "lock", lock)
        others.append(WeightsFolder(tmp_path))
        lock(file, directory)

    monkeypatch.setattr(folder, "lock", late)
    own = WeightsFolder(tmp_path)
    assert own.write(1, {}).parent.parent == tmp_path.resolve()
    assert len(os.listdir(tmp_path)) == 2
    shutil.rmtree(own.write(2, {}).parent)
    with pytest.raises(WeightsUnavailable, match="version 3 cannot be written"):
        own.write(3, {})
    others[0].close()


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


def test_a_huge_directory_is_refused_before_descriptors_run_out(root: Path) -> None:
    (root / "sub").mkdir()
    for number in range(MAX_ENTRIES - 1):
        (root / "sub" / str(number)).touch()
    assert len(read(Home(root), root)) == MAX_ENTRIES - 1
    (root / "one").touch()
    gc.collect()  # what it closes is not counted
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
    assert set(os.listdir("/proc/self/fd")) <= descriptors


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
@pytest.mark.parametrize(
    "enter",
    [lambda path: held(path).__enter__(), lambda path: locked(path / "lock").__enter__(), WeightsFolder],
)
def test_a_file_system_without_locks_error_names_a_mount_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, enter: Callable[[Path], object]
) -> None:
    def refuse(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(RolemeshError, match=f"{tmp_path} is on a file system without locks .*option flock"):
        enter(tmp_path)
