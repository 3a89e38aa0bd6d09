"""A file of the run directory that cannot be written is named: the system itself names none."""

from __future__ import annotations

from pathlib import Path

import pytest
from full_disk import files_of_at_most

from rolemesh.services.controller.run.durably import write_durably
from rolemesh.services.controller.run.run_dir import MetricsFile


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    config, metrics = tmp_path / "config.yaml", tmp_path / "metrics.jsonl"
    config.write_text("old")
    file = MetricsFile(metrics, None)
    found = []
    for write in (lambda: write_durably(config, "longer"), lambda: file.log(1, {"a": 1.0}), file.close):
        with files_of_at_most(4), pytest.raises(OSError, match="File too large") as error:
            write()
        found.append(error.value.filename)
    assert found == [str(config), str(metrics), str(metrics)]
    assert config.read_text() == "old"
