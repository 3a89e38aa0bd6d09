"""`rolemesh answers` shows a run's dumps."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from in_process_commands import rolemesh

from rolemesh.services.command_line.app import main

ROW: dict[str, Any] = {
    "input": "user\n12+30=", "output": "calls it 42", "gts": "42", "score": 1.0, "acc": 1.0, "step": 7,
    "uid": "row-1", "data_source": "sums",
    "conversation": {
        "why": "answered", "turns": 2.0,
        "said": [
            {"who": "policy", "tokens": 3, "text": "calls \x1b[31m it", "reward": 0.5},
            {"who": "environment", "tokens": 2, "text": "[bold]42[/bold]"},
            {"who": "policy", "tokens": 1, "text": "42", "reward": 0.0},
        ],
    },
}  # fmt: skip
ONE_TURN = {key: value for key, value in ROW.items() if key != "conversation"} | {"uid": "row-2"}


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for step in (7, 10):
        rows = ({**row, "step": step} for row in (ROW, ONE_TURN))
        (dumps / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.yaml").write_text(f"trainer: {{rollout_data_dir: {dumps}}}\n")
    return tmp_path


def test_a_conversation_is_shown_turn_by_turn(run_directory: Path) -> None:
    said = rolemesh("answers", run_directory)
    assert said.returncode == 0, said.stderr
    assert "step 10  sums  row-1" in said.stdout
    lines = [line.strip("│ ") for line in said.stdout.splitlines()]
    at = lines.index("── policy, 3 tokens, reward 0.5")
    assert lines[at:at + 6] == [
        "── policy, 3 tokens, reward 0.5", r"calls \u001b[31m it",
        "── environment, 2 tokens", "[bold]42[/bold]",
        "── policy, 1 tokens", "42",
    ]  # fmt: skip
    assert "score 1   truth 42   ended: answered   turns 2" in said.stdout


def test_a_character_that_the_terminal_lacks_is_escaped(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {**ONE_TURN, "output": "да 🙂"}
    (run_directory / "dumps" / "10.jsonl").write_text(json.dumps(row) + "\n")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="koi8-r")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "argv", ["rolemesh", "answers", str(run_directory)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    stdout.flush()
    assert r"да \U0001f642" in stdout.buffer.getvalue().decode("koi8-r")


def test_step_uid_and_number_of_rows_are_chosen(run_directory: Path) -> None:
    for where in (run_directory, run_directory / "dumps", run_directory / "dumps" / "7.jsonl"):
        said = rolemesh("answers", where, "--step", "7", "--rows", "5").stdout
        assert said.count("step 7  sums  row-") == 2
    assert "row-1" not in rolemesh("answers", run_directory, "--uid", "row-2").stdout


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--step", "8"], "has no dump of step 8 (<step>.jsonl); there are steps 7 to 10"),
        (["--uid", "row-3"], "10.jsonl has no row of uid row-3"),
    ],
)
def test_what_is_not_there_is_named(run_directory: Path, options: list[str], error: str) -> None:
    said = rolemesh("answers", run_directory, *options)
    assert said.returncode == 2
    assert error in said.stderr


def test_a_file_that_is_not_a_dump_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "3.jsonl"
    file.write_text(json.dumps(ROW) + "\n[1]\n")
    said = rolemesh("answers", tmp_path, "--rows", "2")
    assert said.returncode == 2
    assert f"{file}, line 2: not a row of trainer.rollout_data_dir" in said.stderr
    (tmp_path / "config.yaml").write_text("trainer: {}\n")
    named = "set trainer.rollout_data_dir or trainer.validation_data_dir"
    assert named in rolemesh("answers", tmp_path).stderr


def test_a_run_that_writes_its_validations_alone_shows_those(run_directory: Path) -> None:
    (run_directory / "validations").mkdir()
    (run_directory / "dumps" / "7.jsonl").rename(run_directory / "validations" / "7.jsonl")
    config, dumps = run_directory / "config.yaml", run_directory / "dumps"
    both = f"validation_data_dir: {run_directory / 'validations'}, rollout_data_dir: "
    for rollouts, step in (("null", 7), (dumps, 10)):
        config.write_text(f"trainer: {{{both}{rollouts}}}\n")
        assert f"step {step}  sums  row-1" in rolemesh("answers", run_directory).stdout
