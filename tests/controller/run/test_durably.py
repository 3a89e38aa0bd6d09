"""A file of the run directory that cannot be written is named: the system itself names none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig
from rolemesh.services.controller.run.durably import write_durably
from rolemesh.services.controller.run.run_dir import MetricsFile, dump, held
from rolemesh.services.processes.role_processes import role_processes


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


def test_a_full_disk_names_the_file_of_a_dump(tmp_path: Path) -> None:
    """trainer.rollout_data_dir. Nothing is left of the half file."""
    with files_of_at_most(4), pytest.raises(OSError, match="File too large") as error:
        dump([{"input": "longer"}], str(tmp_path / "rollouts"), 3)
    assert error.value.filename == str(tmp_path / "rollouts" / "3.jsonl")
    assert not [*(tmp_path / "rollouts").iterdir()]


async def test_a_full_disk_names_the_job_file_of_the_roles(tmp_path: Path) -> None:
    job = make_job({"trainer": {"default_local_dir": str(tmp_path)}})
    with files_of_at_most(4), pytest.raises(OSError, match="File too large") as error:
        async with role_processes(job):
            pass
    assert error.value.filename == str(tmp_path / "logs" / "job.yaml")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("place", ["/proc/nope", "/proc/version/run"])
def test_a_run_directory_that_cannot_be_made_names_its_key(place: str) -> None:
    with (
        pytest.raises(InvalidConfig, match=f"^{place} cannot be written: .* set trainer.default_local_dir to "),
        held(Path(place)),
    ):
        pass
