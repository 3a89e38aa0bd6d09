"""scripts/test: what failed is looked at once more, alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Fails while the file beside it is not there, and makes it: red the first time, green from then on.
UNSTEADY = """
from pathlib import Path

import pytest


@pytest.mark.parametrize("case", ["a b", "[c::d]"])
def test_unsteady(case):
    been_here = Path(__file__).with_name(f"been-here-{case[:2]}")
    seen = been_here.exists()
    been_here.touch()
    assert seen, "the first time"
"""

UNSTEADY_FILE = "/".join(("tests", "test_unsteady.py"))


def scripts_test(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines of scripts/test in a project of its own; FAILED_TESTS is `failed` in it."""
    script = folder / "scripts" / "test"
    script.parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "test", script)
    (folder / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    command = [sys.executable, str(script), "-n", "2", "-p", "no:cacheprovider", *arguments]
    # Other plug-ins take seconds to import, in each of its processes.
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    environment = os.environ | plugins | {"FAILED_TESTS": str(folder / "failed")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    return done.returncode, done.stdout.splitlines()


def written(folder: Path, **files: str) -> Path:
    (folder / "tests").mkdir()
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text)
    return folder


def test_a_test_passing_alone_is_green_and_listed_as_unsteady(tmp_path: Path) -> None:
    status, lines = scripts_test(written(tmp_path, unsteady=UNSTEADY, good="def test_good(): pass"))
    assert status == 0
    assert lines[-3] == "=== 0 failed twice, 2 unsteady"
    names = [f"{UNSTEADY_FILE}::test_unsteady[{case}]" for case in ("[c::d]", "a b")]
    assert sorted(lines[-2:]) == [f"unsteady: {name}: AssertionError: the first time" for name in names]
    assert (tmp_path / "failed").read_text().splitlines() == lines[-2:]


def test_a_test_that_fails_twice_is_red_and_strict_runs_try_once(tmp_path: Path) -> None:
    folder = written(tmp_path, bad="def test_bad(): assert 1 == 2", unsteady=UNSTEADY)
    bad = "/".join(("tests", "test_bad.py::test_bad: assert 1 == 2"))
    status, lines = scripts_test(folder)
    assert status == 1
    assert lines[-4:-2] == ["=== 1 failed twice, 2 unsteady", f"failed twice: {bad}"]
    assert (folder / "failed").read_text().splitlines() == lines[-3:]
    status, lines = scripts_test(folder, "--strict")
    assert status == 1
    assert not [line for line in lines if "again, each alone" in line]
    assert (folder / "failed").read_text().splitlines()[3:] == [f"failed: {bad}"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        pytest.param(
            "[1 / 0 for _ in [1]]", [": collect: ZeroDivisionError: "], id="a file that cannot be imported"
        ),
        pytest.param(
            "import pytest\n@pytest.mark.parametrize('n', range(21))\ndef test_bad(n): assert n < 0",
            [f"::test_bad[{n}]: assert {n} < 0" for n in range(21)],
            id="more than 20 failures",
        ),
    ],
)
def test_failures_that_are_not_flaky_are_named_and_not_retried(
    tmp_path: Path, text: str, named: list[str]
) -> None:
    status, lines = scripts_test(written(tmp_path, bad=text))
    assert status != 0
    assert not [line for line in lines if "again, each alone" in line]
    failed = (tmp_path / "failed").read_text().splitlines()
    assert len(failed) == len(named)
    assert all(any(words in line for line in failed) for words in named)
