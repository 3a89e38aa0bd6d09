"""Tests that start processes: which have the mark `processes`, and that two of them never run at once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from heavy_scheduling import LONGEST
from heavy_tests import counts

ROOT = Path(__file__).parents[2]

SUPPORT = """
import functools
import subprocess
import sys
from contextlib import contextmanager


def run(code="pass"):
    return subprocess.run([sys.executable, "-S", "-c", code])


@functools.cache
def answer():
    return run().returncode


@contextmanager
def started():
    with subprocess.Popen([sys.executable, "-S", "-c", "pass"]) as process:
        yield process


class Server:
    def start(self):
        return run()


def computed():
    return subprocess.PIPE
"""

RENDERING = """
import subprocess


def run_go(*command):
    return subprocess.run(command)
"""


def tiny(folder: Path, **files: str) -> Path:
    """Write a project with these tests, whose pytest has the plug-ins of this one."""
    (folder / "pytest.ini").write_text(
        f"[pytest]\ntestpaths = tests\npythonpath = tests/support {ROOT / 'tests' / 'support'}\n"
        "markers = processes\n"
    )
    (folder / "tests" / "support").mkdir(parents=True)
    (folder / "tests" / "conftest.py").write_text('pytest_plugins = ["heavy_tests", "heavy_scheduling"]\n')
    (folder / "tests" / "support" / "starting.py").write_text(SUPPORT)
    (folder / "tests" / "support" / "rendering.py").write_text(RENDERING)
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text)
    return folder


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    plugins = ("-p", "no:cacheprovider", "-p", "xdist", "-p", "random_order")
    command = [sys.executable, "-m", "pytest", *plugins, *arguments]
    # Other plug-ins take seconds to import, in each of its processes.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )


# ------------------------------------------------------------------------------- the mark

REACHING = {
    "by a call": "def test_it(): subprocess.run(['true'])",
    "by a module of support": "def test_it(): starting.run()",
    "by a function of support": "def test_it(): run()",
    "by a context manager": "def test_it():\n    with started(): pass",
    "by a cached function": "def test_it(): answer()",
    "by a method of a class": "def test_it(): Server().start()",
    "in an inner function": "def test_it():\n    def inner(): run()\n    inner()",
    "by asyncio": (
        "async def start(): await asyncio.create_subprocess_exec('true')\ndef test_it(): asyncio.run(start())"
    ),
    "by a context of multiprocessing": (
        "FORKS = multiprocessing.get_context('forkserver')\ndef test_it(): FORKS.Process()"
    ),
    "by a fixture": "@pytest.fixture(scope='module')\ndef server(): yield run()\ndef test_it(server): pass",
    "by a fixture's fixture": (
        "@pytest.fixture\ndef server(): run()\n"
        "@pytest.fixture\ndef client(server): pass\n"
        "def test_it(client): pass"
    ),
    "by a parameter": (
        "@pytest.mark.parametrize('act', [functools.partial(run, 'pass')])\ndef test_it(act): act()"
    ),
}
NOT_REACHING = {
    "by Helm's renders": "def test_it(): rendering.run_go('helm')",
    "with a constant": "def test_it(): subprocess.PIPE, computed()",
    "beside one that does": "def other(): run()\ndef test_it(): pass",
    "with a type": "def test_it(process: subprocess.Popen[bytes] | None = None): pass",
}
HEAD = """
from __future__ import annotations
import asyncio, functools, multiprocessing, subprocess
import pytest, rendering, starting
from starting import Server, answer, computed, run, started
"""


def test_a_test_that_can_reach_a_process_start_is_marked(tmp_path: Path) -> None:
    """The test reaches it by the names that it uses."""
    cases = [*REACHING.values(), *NOT_REACHING.values()]
    tiny(tmp_path, **{f"case_{number}": HEAD + case for number, case in enumerate(cases)})
    listed = run_pytest(tmp_path, "-n", "0", "-q", "--collect-only", "-m", "processes").stdout
    marked = sorted(int(number) for number in re.findall(r"test_case_(\d+)\.py::test_it", listed))
    assert marked == list(range(len(REACHING))), listed


@pytest.mark.parametrize(
    "start",
    [
        "hidden('subprocess').run([sys.executable, '-S', '-c', 'pass'])",
        "hidden('os').waitpid(hidden('os').fork() or hidden('os')._exit(0), 0)",
        "hidden('multiprocessing').get_context('spawn').Process(target=len, args=('',)).start()",
    ],
    ids=["a Python", "a fork", "multiprocessing"],
)
def test_an_unmarked_test_that_starts_a_process_fails_by_name(tmp_path: Path, start: str) -> None:
    imports = "import multiprocessing, os, subprocess, sys\nhidden = sys.modules.get\n"
    hidden = f"{imports}def test_it(): {start}\n"
    marked = hidden.replace("def test_it", "import pytest\n@pytest.mark.processes\ndef test_marked")
    light = "import sys\ndef test_light(): sys.modules['subprocess'].run(['true'])\n"
    tiny(tmp_path, hidden=hidden, marked=marked, light=light)
    ran = run_pytest(tmp_path, "-n", "0", "-q")
    assert "3 passed, 1 error" in ran.stdout
    file = "/".join(("tests", "test_hidden.py"))  # of the session that ran
    assert f"without the mark `processes`, {file}::test_it started: " in ran.stdout


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        ([sys.executable, "-m", "rolemesh", "serve", "reward"], True),
        (["/usr/bin/python3.11", "-c", "import torch"], True),
        (["/usr/bin/prometheus", "--config.file=x"], True),
        (["/usr/local/bin/helm", "template", "demo"], False),
        ([sys.executable, "-P", "-m", "rolemesh.services.reward.scoring_process", "7", "1"], False),
        ([sys.executable, "-S", "-s", "-B", "-P", "-m", "rolemesh.sandbox.inside", "7", "8"], False),
        (["kubectl", "get", "pods"], False),
    ],
)
def test_a_process_counts_if_it_costs_as_much_as_a_role(command: list[str], heavy: bool) -> None:
    assert counts(command) == heavy


def test_this_projects_tests_have_the_plug_ins(pytestconfig: pytest.Config) -> None:
    assert all(map(pytestconfig.pluginmanager.hasplugin, ("heavy_tests", "heavy_scheduling")))


# ------------------------------------------------------------------------------- the scheduler

# Each test notes its process. A heavy test takes a lock, and fails if another has it.
BESIDE = """
import fcntl, os, subprocess, sys
from pathlib import Path
import pytest

HERE = Path(__file__).parent


def note(name):
    with (HERE / "log").open("a") as log:
        log.write(f"{os.environ.get('PYTEST_XDIST_WORKER', 'alone')} {name}\\n")


def heavy(name):
    with (HERE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        note(name)
        subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
"""
HEAVY = """
from beside import *

@pytest.mark.parametrize("number", range(4))
def test_heavy(number):
    heavy(Path(__file__).name)
"""
LIGHT = """
from beside import *

@pytest.mark.parametrize("number", range(20))
def test_light(number):
    note("light")
"""
WAITS = """
from beside import *

def test_heavy():
    with open(HERE / "begun") as begun:  # until a light test opens it
        begun.read()
    heavy(Path(__file__).name)
"""
BEGINS = """
from beside import *

def test_light():
    note("light")
    open(HERE / "begun", "w").close()
"""
WAITS_FOR_LAST = """
from beside import *

def test_light():
    note("light")
    with open(HERE / "last") as last:  # until the last file's test opens it
        last.read()
"""
LAST = """
from beside import *

def test_light():
    note("last")
    open(HERE / "last", "w").close()
"""
THEN_BEGINS = """
def test_then():
    note("last")
    open(HERE / "begun", "w").close()
"""
NAMED = """
from beside import *

@pytest.mark.parametrize("number", range(6))
def test_light(number):
    note(Path(__file__).name)
"""
DIES = """
from beside import *

def test_dies():
    heavy(Path(__file__).name)
    if not (HERE / "died").exists():
        (HERE / "died").touch()
        os._exit(1)
"""


def notes(folder: Path) -> list[tuple[str, str]]:
    """Test process and name of each test that ran, in their order."""
    return [tuple(line.split()) for line in (folder / "tests" / "log").read_text().splitlines()]  # type: ignore[misc]


def beside(folder: Path, **files: str) -> Path:
    tiny(folder, **files)
    (folder / "tests" / "support" / "beside.py").write_text(BESIDE.replace(".parent", ".parents[1]"))
    return folder


def passed(ran: subprocess.CompletedProcess[str], count: int) -> None:
    assert f"{count} passed" in ran.stdout.splitlines()[-1], ran.stdout + ran.stderr


def test_heavy_tests_run_in_one_process_beside_light_ones(tmp_path: Path) -> None:
    """The first then helps with the light ones, and begins with the last file."""
    beside(tmp_path, a=WAITS, b=HEAVY, c=HEAVY, begins=BEGINS, d=WAITS_FOR_LAST, light=LIGHT, z=LAST)
    for fifo in ("begun", "last"):
        os.mkfifo(tmp_path / "tests" / fifo)
    passed(run_pytest(tmp_path, "-n", "2", "--no-loadscope-reorder"), 1 + 4 + 4 + 1 + 1 + 20 + 1)
    ran = notes(tmp_path)
    (process,) = {process for process, name in ran if name not in ("light", "last")}
    assert {other for other, name in ran if name == "light"} - {process}
    names = [name for of, name in ran if of == process]
    heavy = ["test_a.py"] + ["test_b.py"] * 4 + ["test_c.py"] * 4  # each file's at a stretch
    assert names[:10] == [*heavy, "last"]


def test_light_processes_start_at_both_ends_and_never_go_back(
    tmp_path: Path,
) -> None:
    """Of two processes with light tests one begins with the last file, and none goes back to a file."""
    files = dict.fromkeys("cde", NAMED)
    beside(tmp_path, a=WAITS, b=WAITS_FOR_LAST, **files, z=LAST + THEN_BEGINS)
    for fifo in ("begun", "last"):
        os.mkfifo(tmp_path / "tests" / fifo)
    passed(run_pytest(tmp_path, "-n", "3", "--no-loadscope-reorder"), 1 + 1 + 3 * 6 + 2)
    ran = notes(tmp_path)
    for process in {process for process, _ in ran}:
        visits = [file for file, _ in groupby(name for of, name in ran if of == process)]
        assert len(visits) == len(set(visits)), visits


def test_the_longest_heavy_file_is_first_unless_order_is_set(tmp_path: Path) -> None:
    by_time = sorted(LONGEST, key=lambda file: -LONGEST[file])
    chosen = [by_time[0], by_time[len(by_time) // 2], by_time[-1]]
    beside(tmp_path, a_file_that_is_in_no_table=HEAVY)
    for file in chosen:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(HEAVY)
    passed(run_pytest(tmp_path, "-n", "2"), 16)
    ran = [name for _, name in notes(tmp_path)]
    expected = [*(Path(file).name for file in chosen), "test_a_file_that_is_in_no_table.py"]
    assert ran == [name for name in expected for _ in range(4)]

    (tmp_path / "tests" / "log").unlink()
    passed(run_pytest(tmp_path, "-n", "2", "--random-order-bucket=module", "--random-order-seed=2"), 16)
    assert list(dict.fromkeys(name for _, name in notes(tmp_path))) != expected  # one of 24 orders


@pytest.mark.parametrize("processes", ["0", "1", "3"])
def test_any_number_of_test_processes_runs_all(tmp_path: Path, processes: str) -> None:
    beside(tmp_path, a=HEAVY, b=HEAVY, light=LIGHT)
    passed(run_pytest(tmp_path, "-n", processes), 28)
    assert len({process for process, name in notes(tmp_path) if name != "light"}) == 1


@pytest.mark.parametrize(("mark", "count"), [("processes", 8), ("not processes", 20)])
def test_heavy_tests_alone_or_light_ones_alone_all_run(tmp_path: Path, mark: str, count: int) -> None:
    beside(tmp_path, a=HEAVY, b=HEAVY, light=LIGHT)
    passed(run_pytest(tmp_path, "-n", "3", "-m", mark), count)


def test_another_process_takes_over_heavy_tests_of_a_dead_one(tmp_path: Path) -> None:
    beside(tmp_path, a=DIES, b=HEAVY, c=HEAVY, light=LIGHT)
    ran = run_pytest(tmp_path, "-n", "2", "--no-loadscope-reorder")
    # The test that killed it is reported as failed, and passes when it runs again.
    assert "1 failed, 29 passed" in ran.stdout.splitlines()[-1], ran.stdout
    heavy = [process for process, name in notes(tmp_path) if name in ("test_b.py", "test_c.py")]
    assert len(heavy) == 8
    assert len(set(heavy)) == 1
