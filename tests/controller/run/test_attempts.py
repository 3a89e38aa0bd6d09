"""A run that reaches no new checkpoint ends after some starts. One that does is never ended by a count."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import pytest
from namespaces import as_container, needs_namespaces

from rolemesh.errors import (
    CheckpointFailed,
    InvalidConfig,
    RoleFailed,
    RolemeshError,
    RoleUnavailable,
    WeightsUnavailable,
)
from rolemesh.services.controller.run.attempts import COUNTED, FILE, Attempts, NoProgress
from rolemesh.services.controller.run.attempts_file import SIZE

LIMIT = 3


def start(
    run_dir: Path, error: BaseException, *, waits: bool = False, have_pods: bool = False, of: str = ""
) -> None:
    """A start that ends with an error, while it waits for roles or after that."""

    def end() -> None:
        attempts = Attempts(run_dir, LIMIT, of)
        with attempts.counted():
            with attempts.waiting(lambda: have_pods):
                if waits:
                    raise error
            with attempts.training(lambda: have_pods):
                raise error

    with pytest.raises(type(error)):
        end()


def refused(run_dir: Path, of: str = "") -> str:
    """The error of a start that does not begin. It is refused again until the roles are scaled down."""
    attempts = Attempts(run_dir, LIMIT, of)
    for _ in range(2):
        with pytest.raises(NoProgress) as error, attempts.counted():
            pytest.fail("it has begun")
    attempts.forget_unnamed()
    return str(error.value)


def starts(run_dir: Path) -> int:
    return int(json.loads((run_dir / FILE).read_text())["starts"])


def begin_and_be_killed(run_dir: Path) -> None:
    """A start of which nothing is left but its file."""
    begun = Attempts(run_dir, LIMIT).counted()
    begun.__enter__()
    saved = (run_dir / FILE).read_bytes()
    begun.__exit__(None, None, None)
    (run_dir / FILE).write_bytes(saved)


def test_starts_without_progress_end_the_run_with_the_last_error(tmp_path: Path) -> None:
    start(tmp_path, OSError("no space left"))
    begin_and_be_killed(tmp_path)
    start(tmp_path, RuntimeError("CUDA out of memory"))
    said = refused(tmp_path)
    assert "was started 3 times" in said
    assert "the last start ended so: RuntimeError: CUDA out of memory. Mend that" in said
    start(tmp_path, OSError())  # somebody has mended the cause, and started it again
    assert starts(tmp_path) == 1


def test_a_start_that_was_killed_counts_also_while_it_prepares(tmp_path: Path) -> None:
    for _ in range(LIMIT):
        begin_and_be_killed(tmp_path)
    assert "ended so: killed, or out of memory" in refused(tmp_path)


def test_an_eviction_while_a_start_prepares_is_no_attempt(tmp_path: Path) -> None:
    """It ends as it would without a count: what SIGTERM did before, it does then."""
    counted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        counted.append(starts(tmp_path))

    default = signal.signal(signal.SIGTERM, note)
    try:
        attempts = Attempts(tmp_path, LIMIT)
        with attempts.counted():
            with attempts.forgiven_at_sigterm():
                assert starts(tmp_path) == 1
                signal.raise_signal(signal.SIGTERM)
            with attempts.forgiven_at_sigterm():
                pass
            assert signal.getsignal(signal.SIGTERM) is note
    finally:
        signal.signal(signal.SIGTERM, default)
    assert counted == [0]


@needs_namespaces
def test_an_eviction_ends_a_start_that_is_process_1(tmp_path: Path) -> None:
    """The kernel drops the signal there once it has no handler."""
    code = (
        "import pathlib, signal\n"
        "from rolemesh.services.controller.run.attempts import Attempts\n"
        "attempts = Attempts(pathlib.Path(), 2)\n"
        "with attempts.forgiven_at_sigterm(), attempts.counted():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
    )
    with as_container(sys.executable, "-c", code, cwd=tmp_path) as ended:
        assert ended.wait(timeout=120) == 128 + signal.SIGTERM
    assert starts(tmp_path) == 0


def test_a_spot_run_with_new_checkpoints_restarts_without_limit(tmp_path: Path) -> None:
    for number in range(5 * LIMIT):
        start(tmp_path, RoleUnavailable("the actor failed"), have_pods=True)
        if number % 2:
            (tmp_path / "latest").write_text(f"global_step_{number}\n")
    assert starts(tmp_path) == 1


def test_a_checkpoint_of_the_start_that_failed_counts_for_it(tmp_path: Path) -> None:
    def save_and_fail() -> None:
        with Attempts(tmp_path, LIMIT).counted():
            (tmp_path / "latest").write_text("global_step_1\n")
            raise RuntimeError("after a checkpoint")

    with pytest.raises(RuntimeError, match="after a checkpoint"):
        save_and_fail()
    start(tmp_path, OSError())
    assert starts(tmp_path) == 1


@pytest.mark.parametrize(
    ("error", "how", "counted"),
    [
        (RoleUnavailable("no node has room"), {"waits": True}, 0),
        (RoleUnavailable("its model is missing"), {"waits": True, "have_pods": True}, 1),
        (OSError("the network is unreachable"), {"waits": True}, 1),
        (RoleUnavailable("failed in a step"), {"have_pods": True}, 1),
        (RoleUnavailable("drained in a step"), {}, 0),
        (RoleFailed("out of memory, and restarted in its pod"), {"have_pods": True}, 1),
        (RoleFailed("drained, and back before the next call"), {}, 0),
        (WeightsUnavailable("they do not fit"), {"have_pods": True}, 1),
        (WeightsUnavailable("drained while weights were sent"), {}, 0),
        (OSError("in a step"), {}, 1),
        (SystemExit(143), {"waits": True}, 0),  # evicted
        (SystemExit(143), {}, 0),
        (InvalidConfig("no such key"), {}, 0),
    ],
)
def test_waiting_for_nodes_and_requested_ends_are_no_attempts(
    tmp_path: Path, error: BaseException, how: dict[str, bool], counted: int
) -> None:
    start(tmp_path, error, **how)
    assert starts(tmp_path) == counted
    if isinstance(error, RolemeshError) and not isinstance(error, InvalidConfig):
        # the Job must not count it a second time
        assert error.exit_code == COUNTED


def test_a_checkpoint_is_new_by_name_or_if_this_start_rewrote_it(tmp_path: Path) -> None:
    """File systems such as FUSE may tell each process another time of the same file."""
    latest = tmp_path / "latest"
    latest.write_text("global_step_1\n")
    for time in (1, 2):
        os.utime(latest, (time, time))
        start(tmp_path, OSError())
        assert starts(tmp_path) == time

    def make_it_again() -> None:
        with Attempts(tmp_path, LIMIT).counted():
            os.utime(latest, (3, 3))
            raise RuntimeError("after it")

    with pytest.raises(RuntimeError, match="after it"):
        make_it_again()
    assert starts(tmp_path) == 0


def test_a_run_that_somebody_starts_anew_counts_its_own_starts(tmp_path: Path) -> None:
    """As after `helm upgrade`, which has another revision, or with another Job."""
    for of, counted in (("job/1", 1), ("job/1", 2), ("job/2", 1), ("other/2", 1)):
        start(tmp_path, OSError(), of=of)
        assert starts(tmp_path) == counted


def test_a_run_past_its_limit_stays_ended_under_the_same_name(tmp_path: Path) -> None:
    """Its roles are gone. The Job that is started again has another name."""
    for _ in range(LIMIT):
        start(tmp_path, OSError(), of="job/1")
    for _ in range(2):
        assert "was started 3 times" in refused(tmp_path, of="job/1")
    start(tmp_path, OSError(), of="job/2")
    assert starts(tmp_path) == 1


def test_a_start_asked_to_end_does_not_count_even_if_it_fails(tmp_path: Path) -> None:
    """A step may take longer than Kubernetes waits, and a drained node may have the roles, too."""
    start(tmp_path, OSError())

    def end() -> None:
        attempts = Attempts(tmp_path, LIMIT)
        with attempts.counted():
            assert starts(tmp_path) == 2
            attempts.forgive()
            assert starts(tmp_path) == 1  # what stays if it is killed now
            raise RuntimeError("the roles are gone, too")

    with pytest.raises(RuntimeError, match="gone, too"):
        end()
    assert starts(tmp_path) == 1


def test_a_start_counts_on_a_full_disk(tmp_path: Path) -> None:
    """Its last error may be long, and an earlier version may have written the file without a fixed size."""
    (tmp_path / f"{FILE}.new").mkdir()
    with pytest.raises(IsADirectoryError), Attempts(tmp_path, LIMIT).counted():
        pytest.fail("it has begun, and nothing counts it")
    known = {"of": "", "checkpoint": "", "starts": 1, "last_error": "x" * SIZE}
    (tmp_path / FILE).write_text(json.dumps(known))
    for counted in (2, 3):
        start(tmp_path, OSError('no "room"' * SIZE))
        assert starts(tmp_path) == counted
        assert (tmp_path / FILE).stat().st_size == SIZE
    assert 'ended so: OSError: no "room"no "room"' in refused(tmp_path)


def lose_file(run_dir: Path) -> None:
    """From now on the count can be neither written nor deleted."""
    (run_dir / FILE).unlink()
    (run_dir / FILE).mkdir()


@pytest.mark.parametrize(
    "error",
    [
        InvalidConfig("no such key"),
        CheckpointFailed("no space left"),
        RoleUnavailable("drained in a step"),
        OSError("no space left"),
        SystemExit(143),
    ],
)
def test_a_start_that_loses_its_count_ends_with_its_own_error(tmp_path: Path, error: BaseException) -> None:
    """The count can no longer be written once the start has begun."""

    def fail() -> None:
        attempts = Attempts(tmp_path, LIMIT)
        with attempts.counted():
            lose_file(tmp_path)
            with attempts.waiting(lambda: True):
                pass
            with attempts.training(lambda: False):
                raise error

    with pytest.raises(type(error)) as raised:
        fail()
    assert raised.value is error
    if isinstance(error, RolemeshError) and not isinstance(error, InvalidConfig):
        assert error.exit_code == COUNTED  # as its file said when it began


def test_a_failed_wait_that_was_not_counted_is_left_to_the_job(tmp_path: Path) -> None:
    """Its exit code is 1, which the Job counts."""

    def wait() -> None:
        attempts = Attempts(tmp_path, LIMIT)
        with attempts.counted(), attempts.waiting(lambda: True):
            lose_file(tmp_path)
            raise RoleUnavailable("its model is missing")

    with pytest.raises(RoleUnavailable, match="its model is missing") as raised:
        wait()
    assert raised.value.exit_code == 1


def test_an_ended_run_succeeds_if_its_count_cannot_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Attempts(tmp_path, LIMIT).counted():
        lose_file(tmp_path)
    assert "earlier starts may count again" in caplog.text


@pytest.mark.parametrize(
    "content",
    ["", "null", "[]", '{"checkpoint": ""}']
    + [f'{{"checkpoint": "", "starts": {starts}, "last_error": ""}}' for starts in ("Infinity", "-1", "[]")],
)
def test_a_file_of_another_shape_counts_from_zero(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    start(tmp_path, OSError())
    assert starts(tmp_path) == 1


def test_an_ended_run_forgets_its_starts(tmp_path: Path) -> None:
    """Without a limit no start is counted."""
    start(tmp_path, OSError())
    with Attempts(tmp_path, LIMIT).counted():
        pass
    Attempts(tmp_path, 0).counted().__enter__()
    assert not (tmp_path / FILE).exists()
