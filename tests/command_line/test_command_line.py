"""What the command line says when the machine says no."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rolemesh
from rolemesh.services.command_line.app import main

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rolemesh", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rolemesh {rolemesh.__version__}\n"


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["rolemesh", "data", "arithmetic", str(tmp_path / "file" / "out")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / "file") in line


def test_the_pages_job_files_are_written_and_the_users_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def rolemesh(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rolemesh", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    own = Path("configs/tiny.yaml")
    own.parent.mkdir()
    own.write_text("trainer: {total_training_steps: 3}\n")
    num_files = sum(path.suffix in (".yaml", ".py") for path in CONFIGS.rglob("*"))
    kept = f"{own} differs from the package's, and is kept\n"
    assert rolemesh("configs") == f"configs: {num_files - 1} files written\n{kept}"
    assert own.read_text() == "trainer: {total_training_steps: 3}\n"
    assert "rollout.generate" in rolemesh("graph", "configs/gsm8k-ppo.yaml", "configs/recipes/gdpo.yaml")
    own.unlink()
    assert rolemesh("configs") == "configs: 1 files written\n"
    assert own.read_bytes() == (CONFIGS / "tiny.yaml").read_bytes()


def test_a_job_without_its_model_names_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with that command the same job gets as far as its data."""
    monkeypatch.chdir(tmp_path)

    def rolemesh(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rolemesh", *arguments])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().err

    run = ("run", str(CONFIGS / "gsm8k-ppo.yaml"))
    error = rolemesh(*run)
    assert error.startswith("error: actor: no such model directory: outputs/gsm8k/model.")
    (making,) = re.findall(r"`rolemesh (model [^`]*)`", error)
    assert rolemesh(*shlex.split(making)) == ""
    assert "data/gsm8k/train.parquet" in rolemesh(*run)


@pytest.mark.parametrize("command", ["run", "sft", "graph", "plan"])
def test_a_misspelt_key_is_named_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    """The plug-in runs where the job file is read, and not in the process that forks roles."""
    plugin, job = tmp_path / "telling.py", tmp_path / "job.yaml"
    plugin.write_text('import sys; print("torch" in sys.modules)')
    job.write_text(f"plugins: [{plugin}]\ntrainer: {{total_trainig_steps: 2}}")
    arguments = (sys.executable, "-m", "rolemesh", command, str(job))
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "did you mean 'trainer.total_training_steps'" in ended.stderr
    assert ended.stdout == "False\n"


# What the end of a process must still do, and an object that only the end of the interpreter would free.
LEFT = """
import atexit, threading

class Freed:
    def __del__(self):
        print("freed")

freed = Freed()
freed.itself = freed
atexit.register(print, "exit function")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
from rolemesh.__main__ import main
main()
"""


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["nonsense"], 2)])
def test_a_process_ends_with_code_and_output_but_frees_nothing(arguments: list[str], code: int) -> None:
    """Its threads and exit functions run to their end."""
    ended = subprocess.run([sys.executable, "-c", LEFT, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["thread", "exit function"]
