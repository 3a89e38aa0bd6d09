"""A fork of the server is what the same command line is in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from forks import own_server, server_process

from rolemesh.services.processes import fork_server
from rolemesh.services.processes.fork_server import ForkServer
from rolemesh.services.processes.launchers import HERE, LocalProcess, RankSlot

# A plug-in that notes what its process is, and ends as told. The job file is then refused: exit code 2.
NOTING = """
import json, os, signal, sys
noted = {
    "arguments": sys.argv[1:], "directory": os.getcwd(), "variables": dict(os.environ),
    "leads": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "open": sorted(os.readlink(f"/proc/self/fd/{n}") for n in (1, 2)) + [len(os.listdir("/proc/self/fd"))],
    "handlers": [signal.getsignal(n) is signal.SIG_DFL for n in (signal.SIGTERM, signal.SIGCHLD)],
}
with open(os.environ["NOTES"] + ".part", "w") as notes:
    json.dump(noted, notes)
os.rename(os.environ["NOTES"] + ".part", os.environ["NOTES"])
if os.environ["ENDS"] == "stdin":
    assert os.read(0, 1) == b""
if os.environ["ENDS"] == "never":
    signal.pause()
print("to the output")
"""


@pytest.fixture
def server() -> ForkServer:
    """The server that other tests have, too; it has imported all that a role needs. No test ends it."""
    return own_server()


@pytest.fixture
def forking(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> ForkServer:
    """Let this process's launcher have that server."""
    monkeypatch.setattr(fork_server, "server", server)
    return server


async def started(directory: Path, ends: str) -> tuple[LocalProcess, Any]:
    """Start a command, and return it with what it noted."""
    job, notes, log = directory / "job.yaml", directory / "notes.json", directory / "log"
    write_job(directory)
    own = {"NOTES": str(notes), "ENDS": ends, "CUDA_VISIBLE_DEVICES": "3"}
    process = await HERE.start(RankSlot(0, 1), ["graph", str(job)], own, log)
    while not notes.exists():
        assert process.returncode is None, log.read_text()
        await asyncio.sleep(0.02)
    return process, json.loads(notes.read_text())


def write_job(directory: Path) -> None:
    directory.mkdir()
    plugin = directory / "noting.py"
    plugin.write_text(NOTING)
    (directory / "job.yaml").write_text(f"plugins: [{plugin}]\ntrainer: {{total_trainig_steps: 2}}")


async def test_a_fork_runs_its_command_line_in_its_own_process(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "7")  # of whoever starts the launcher
    (tmp_path / "here").mkdir()
    found = []
    monkeypatch.chdir(tmp_path / "here")
    for by in (None, server):
        monkeypatch.setattr(fork_server, "server", by)
        process, noted = await started(tmp_path / "job", ends="at once")
        await process.gone
        assert process.returncode == 2
        assert noted["leads"]
        noted["variables"].pop("LC_CTYPE", None)  # a Python that starts in the C locale sets it
        folder = (tmp_path / "job").rename(tmp_path / f"job-{len(found)}")
        found.append((noted, (folder / "log").read_text()))
    assert found[0] == found[1]
    noted, log = found[0]
    assert "RANK" not in noted["variables"]
    assert noted["variables"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert noted["directory"] == str(tmp_path / "here")
    assert log.startswith("to the output\nerror: ")
    assert "total_training_steps" in log


@pytest.mark.usefixtures("forking")
async def test_a_process_reports_its_exit_and_its_pipe_closes(tmp_path: Path) -> None:
    """The pipe closes when the launcher ends."""
    killed, _ = await started(tmp_path / "killed", ends="never")
    ended, _ = await started(tmp_path / "ended", ends="never")
    left, _ = await started(tmp_path / "left", ends="stdin")
    killed.kill()
    ended.terminate()
    left.close_stdin()
    for process in (killed, ended, left):
        await process.gone
    codes = [process.returncode for process in (killed, ended, left)]
    assert codes == [-signal.SIGKILL, -signal.SIGTERM, 2]
    for process in (killed, left):
        with pytest.raises(ProcessLookupError):
            process.kill()


async def test_forks_of_a_killed_server_end_and_the_next_is_no_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process is started without the server."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the server has it: to change it, a fork imports torch
    # The installed command `rolemesh` has imported its module by name before it forks the server.
    with closing(server_process(["rolemesh.__main__"])) as server:
        monkeypatch.setattr(fork_server, "server", server)
        lost = [(await started(tmp_path / name, ends="never"))[0] for name in "ab"]
        assert [(tmp_path / name / "log").read_text() for name in "ab"] == ["", ""]
        ends = [os.pidfd_open(process.pid) for process in lost]
        os.kill(server.pid, signal.SIGKILL)
        for process in lost:
            await process.gone
            assert process.returncode == -signal.SIGKILL
        for end in ends:
            assert select.select([end], [], [], 60)[0]
            os.close(end)
        process, _ = await started(tmp_path / "next", ends="at once")
        await process.gone
        assert process.returncode == 2


async def test_a_signal_to_the_launcher_by_name_spares_the_fork_server(
    forking: ForkServer, tmp_path: Path
) -> None:
    before, _ = await started(tmp_path / "before", ends="stdin")
    for number in fork_server.ASKING:
        os.kill(forking.pid, number)
    after, noted = await started(tmp_path / "after", ends="stdin")
    assert all(noted["handlers"])  # its own are as in any process
    for process in (before, after):
        process.close_stdin()
        await process.gone
        assert process.returncode == 2


def test_it_ends_with_the_launcher_however_that_ends() -> None:
    code = (
        "import sys\n"
        "from rolemesh.services.processes import fork_server\n"
        "fork_server.begin_forking([])\n"
        "print(fork_server.server.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    for killed in (False, True):
        launcher = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        end = os.pidfd_open(int(launcher.stdout.readline()))
        if killed:
            launcher.kill()
        else:
            launcher.stdin.close()
        assert launcher.wait(60) == (-signal.SIGKILL if killed else 0)
        assert select.select([end], [], [], 60)[0]
        os.close(end)
        launcher.stdout.close()
