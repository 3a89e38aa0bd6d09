"""Starts of a controller that end before its run has begun end the run as those of the run do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from api_server import api_server
from test_scale_down import in_pod, patched

from rolemesh.errors import InvalidConfig
from rolemesh.services.command_line.app import app
from rolemesh.services.controller.run.attempts import NoProgress
from rolemesh.services.controller.run.attempts_file import SIZE
from rolemesh.services.controller.scale_down import workloads
from rolemesh.services.controller.start_guard import start_guard

LIMIT = 2
LEFT = workloads(["deployment/a"])


@pytest.fixture(autouse=True)
def _no_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may run in one."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def count_in(file: Path) -> int:
    return int(json.loads(file.read_text())["starts"])


def begin_and_be_killed(file: Path) -> None:
    """A start of which nothing is left but its file."""
    start = start_guard(file, LIMIT)
    start.__enter__()
    saved = file.read_bytes()
    start.__exit__(None, None, None)
    file.write_bytes(saved)


@pytest.mark.usefixtures("logs_as_before")
async def test_a_run_that_cannot_begin_scales_its_roles_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would: its controller has not read the job, or has died of its imports."""
    job, file = tmp_path / "job.yaml", tmp_path / "starts.json"
    job.write_text("trainer: {total_trainig_steps: 2}")
    for _ in range(LIMIT):
        begin_and_be_killed(file)

    def read_a_wrong_job() -> None:
        command = typer.main.get_command(app)
        arguments = ["control", f"--config={job}", "--actor=127.0.0.1:1", "--scale-down=deployment/a"]
        command.main(arguments, standalone_mode=False)

    def start_again() -> None:
        with start_guard(file, LIMIT, scaled_down=LEFT):
            pytest.fail("it has begun")

    starts: list[tuple[Callable[[], None], type[Exception], str]] = [
        (read_a_wrong_job, InvalidConfig, "did you mean 'trainer.total_training_steps'"),
        (start_again, NoProgress, "started 2 times and did not begin; .* ended so: killed, or out of memory"),
    ]
    async with api_server(tmp_path) as api:
        in_pod(api, monkeypatch)
        for start, error, words in starts:
            run = asyncio.create_task(asyncio.to_thread(start))
            request, change = await patched(api, "/apis/apps/v1/namespaces/here/deployments/a/scale")
            assert change == {"spec": {"replicas": 0}}
            assert file.exists()  # a start that is killed now is followed by another that scales down
            await request.answer({})
            with pytest.raises(error, match=words):
                await run
    assert count_in(file) == 0


def test_a_start_that_begins_resets_the_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What follows its end is then left to the run."""
    file = tmp_path / "starts.json"
    with pytest.raises(MemoryError), start_guard(file, LIMIT):
        raise MemoryError
    assert count_in(file) == 1

    def begin_and_fail() -> None:
        with start_guard(file, LIMIT, scaled_down=LEFT) as begun:
            begun()
            assert count_in(file) == 0
            raise InvalidConfig("the run has scaled down")

    with pytest.raises(InvalidConfig, match="the run has scaled down"):
        begin_and_fail()
    assert count_in(file) == 0
    assert "could not scale down" not in caplog.text  # a second time, which would fail: this is no pod


def test_starts_count_on_a_disk_full_since_an_earlier_start(tmp_path: Path) -> None:
    """There is no room for a new file, so the one of the start that began must be there still."""
    file = tmp_path / "starts.json"
    with start_guard(file, LIMIT) as begun:
        begun()
    assert file.stat().st_size == SIZE
    (tmp_path / "starts.json.new").mkdir()
    for count in (1, 2):
        with pytest.raises(MemoryError), start_guard(file, LIMIT):
            raise MemoryError
        assert count_in(file) == count
    with pytest.raises(NoProgress), start_guard(file, LIMIT):
        pytest.fail("it has begun")


def test_an_uncountable_start_begins_and_keeps_its_own_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The workspace may be full, and the run directory elsewhere."""
    absent, counted = tmp_path / "absent" / "starts.json", tmp_path / "counted"
    with pytest.raises(MemoryError), start_guard(absent, LIMIT):
        raise MemoryError
    assert "starts that end before the run begins are not counted" in caplog.text

    with pytest.raises(MemoryError), start_guard(counted, LIMIT):
        raise MemoryError
    file = tmp_path / "starts.json"
    file.symlink_to(counted)  # is not written through
    (tmp_path / "starts.json.new").mkdir()
    with start_guard(file, LIMIT) as begun:
        begun()
    assert not file.is_symlink()


def test_a_start_begins_though_its_count_cannot_be_deleted(tmp_path: Path) -> None:
    """What it is to say, e.g. that another run has the directory, must not be replaced, either."""
    file = tmp_path / "starts.json"
    with start_guard(file, LIMIT) as begun:
        file.unlink()
        file.mkdir()
        begun()


def test_the_count_ignores_a_workspace_file_called_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may write its checkpoints there, or another program something that is no text."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "starts.json"
    for number in range(LIMIT):
        (tmp_path / "latest").write_bytes(b"\xff" * (number + 1))
        with pytest.raises(MemoryError), start_guard(file, LIMIT):
            raise MemoryError
    with pytest.raises(NoProgress), start_guard(file, LIMIT):
        pytest.fail("it has begun")


def test_the_error_of_a_start_comes_before_that_of_scaling_down(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidConfig, match="a wrong key"), start_guard(None, scaled_down=LEFT):
        raise InvalidConfig("a wrong key")
    assert "could not scale down deployment/a: the job needs the Kubernetes API, but" in caplog.text
