"""What the command line says when the machine says no."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.__main__ import main


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
