"""What comes before a controller in its pod: failures count as starts of the run do, and end it as those do."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from api_server import api_server
from in_process_commands import rolemesh
from test_scale_down import in_pod, patched

from rolemesh.errors import InvalidConfig, RolemeshError
from rolemesh.rpc.calling.dispatch import cancel_all
from rolemesh.services.controller.prepare_lock import locked
from rolemesh.services.controller.preparing import NotPrepared, prepare, refuse_wrong_job
from rolemesh.services.controller.run.attempts import COUNTED, Attempts, NoProgress
from rolemesh.services.controller.scale_down import workloads

LIMIT = 2
FAILS = ["sh", "-c", "exit 7"]


def counting(directory: Path) -> Attempts:
    return Attempts(directory, LIMIT, file=directory / "counts.json", failing="could not be prepared")


async def test_an_existing_result_is_kept_and_success_resets_failures(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with pytest.raises(NotPrepared, match="`sh -c 'exit 7'` ended with status 7") as failed:
        await prepare(FAILS, made, counting(tmp_path))
    assert failed.value.exit_code == COUNTED
    assert (tmp_path / "counts.json").exists()
    await prepare(["touch", str(made)], made, counting(tmp_path))
    assert not (tmp_path / "counts.json").exists()
    await prepare(FAILS, made, counting(tmp_path))


async def test_a_command_that_does_not_make_what_it_should_has_failed(tmp_path: Path) -> None:
    """Or each start would run it again, without end."""
    with pytest.raises(NotPrepared, match="`true` of prepare succeeded, but did not create") as failed:
        await prepare(["true"], tmp_path / "made", counting(tmp_path))
    assert failed.value.exit_code == COUNTED
    assert '"starts": 1' in (tmp_path / "counts.json").read_text()


def test_a_wrong_job_is_refused_though_another_pod_prepares(tmp_path: Path) -> None:
    """Unless it has plug-ins, which the command may make."""
    made, job, lock = tmp_path / "made", tmp_path / "job.yaml", tmp_path / "lock"
    prepares = ("prepare", f"--creates={made}", f"--job={job}", f"--lock={lock}", "--", "touch", made)
    job.write_text("trainer: {sav_freq: 1}")
    with locked(lock):
        refused = rolemesh(*prepares)
    assert refused.returncode == 2
    assert "unknown key 'trainer.sav_freq'" in refused.stderr
    assert not made.exists()
    job.write_text("plugins: [made.py]\ntrainer: {sav_freq: 1}")
    assert rolemesh(*prepares).returncode == 0
    assert made.exists()


async def test_a_wrong_job_scales_its_roles_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("data: {train_batch_size: 100}")
    async with api_server(tmp_path) as api:
        in_pod(api, monkeypatch)
        refused = asyncio.create_task(refuse_wrong_job(job, workloads(["deployment/job-reward"])))
        path = "/apis/apps/v1/namespaces/here/deployments/job-reward/scale"
        request, change = await patched(api, path)
        assert change == {"spec": {"replicas": 0}}
        await request.answer({})
        with pytest.raises(InvalidConfig, match="train_batch_size"):
            await refused


@pytest.mark.parametrize(
    ("command", "failures", "error", "words"),
    [
        (FAILS, LIMIT, NoProgress, "started 2 times and could not be prepared; .* ended with status 7"),
        (["sh", "-c", "exit 2"], 0, InvalidConfig, "would do so again"),  # a name that the Hub does not have
        (["./absent"], 0, InvalidConfig, "cannot start `./absent`: there is no such program"),
    ],
)
async def test_a_run_that_cannot_be_prepared_scales_its_roles_down(
    command: list[str],
    failures: int,
    error: type[RolemeshError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No controller will do it. Before that it does nothing: the next try needs the roles."""
    left = workloads(["deployment/job-reward"])
    async with api_server(tmp_path) as api, AsyncExitStack() as stack:
        in_pod(api, monkeypatch)
        for _ in range(failures):
            with pytest.raises(NotPrepared):
                await prepare(command, tmp_path / "made", counting(tmp_path), final=2, scaled_down=left)
        assert api.requests.empty()
        last = prepare(command, tmp_path / "made", counting(tmp_path), final=2, scaled_down=left)
        run = asyncio.create_task(last)
        stack.push_async_callback(cancel_all, [run])
        request, change = await patched(api, "/apis/apps/v1/namespaces/here/deployments/job-reward/scale")
        assert change == {"spec": {"replicas": 0}}
        assert (tmp_path / "counts.json").exists()  # if it is killed now, the next start does the same
        await request.answer({})
        with pytest.raises(error, match=words):
            await run
        assert (tmp_path / "counts.json").exists() == (error is not NoProgress)


@pytest.mark.parametrize(
    ("content", "mode", "why", "instead"),
    [
        ("exit 0", 0o755, "it has no `#!` line", "write [sh, STEP, a b]"),
        ("#!/bin/sh", 0o644, "it is not executable", "write [sh, STEP, a b]"),
        ("#!/no/such/sh", 0o755, "the program in its `#!` line does not exist", "as in [sh, STEP, a b]"),
        (None, 0o755, "it is a directory", "write the program in it"),
    ],
)
async def test_a_command_that_can_never_start_is_wrong_configuration(
    content: str | None, mode: int, why: str, instead: str, tmp_path: Path
) -> None:
    """The message names the step and says what to write, and the failure is not counted."""
    step, made = tmp_path / "step", tmp_path / "made"
    if content is None:
        step.mkdir()
    else:
        step.write_text(content)
    step.chmod(mode)
    with pytest.raises(InvalidConfig) as failed:
        await prepare([str(step), "a b"], made, counting(tmp_path))
    said = str(failed.value)
    assert said.startswith(f"the step of prepare that creates {made} cannot start `{step} 'a b'`: {why}")
    assert said.endswith(instead.replace("STEP", str(step)))
    assert '"starts": 0' in (tmp_path / "counts.json").read_text()


async def test_a_non_executable_in_path_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell would not look for a script's name in PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "step").write_text("#!/bin/sh")
    (tmp_path / "step").chmod(0o644)
    (tmp_path / "folder").mkdir()
    said = []
    for program in ("step", "folder"):
        with pytest.raises(InvalidConfig) as failed:
            await prepare([program], tmp_path / "made", counting(tmp_path))
        said.append(str(failed.value).partition(f"`{program}`: ")[2])
    assert said == [
        f"it is not executable; if it is a script, write [sh, {tmp_path}/step]",
        f"{tmp_path}/folder is a directory; write the program in it",
    ]


async def test_an_evicted_pod_ends_its_command_and_counts_nothing(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)

    async def evict() -> None:
        await asyncio.to_thread(begun.read_text)
        os.kill(os.getpid(), signal.SIGTERM)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    evicting = asyncio.create_task(evict())
    with pytest.raises(SystemExit) as ended:
        await prepare(["sh", "-c", f"echo >{begun}; exec sleep 60"], tmp_path / "made", counting(tmp_path))
    await evicting
    assert ended.value.code == 128 + signal.SIGTERM
    assert '"starts": 0' in (tmp_path / "counts.json").read_text()
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.mark.usefixtures("logs_as_before")
@pytest.mark.parametrize(
    ("number", "code", "starts"), [(errno.EIO, COUNTED, 1), (errno.ESTALE, COUNTED, 1), (errno.EACCES, 2, 0)]
)
def test_a_file_system_that_fails_is_a_failure_of_the_step(
    number: int, code: int, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Path.exists` of Python 3.11 raises it. Nothing is made anew: what the command creates may be there."""
    made, counts, stat = tmp_path / "made", tmp_path / "counts.json", os.stat

    def fail(path: Any, **how: Any) -> os.stat_result:
        if str(path) == str(made):
            raise OSError(number, os.strerror(number), str(path))
        return stat(path, **how)

    monkeypatch.setattr("os.stat", fail)
    options = (f"--creates={made}", f"--counts-in={counts}", "--max-attempts=5")
    ended = rolemesh("prepare", *options, "--", "touch", tmp_path / "ran")
    assert f"cannot tell whether {made}, which prepare creates, is there" in ended.stderr
    assert ended.returncode == code
    assert f'"starts": {starts}' in counts.read_text()
    assert not (tmp_path / "ran").exists()
