"""What is installed is whole: a wheel made of this tree finds what it needs beside its code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("rolemesh", "services", "charts", "configs", "pyproject.toml", "README.md", "LICENSE")


def test_a_wheel_holds_services_placements_and_job_files(tmp_path: Path) -> None:
    """And it is one package."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            # Other processes write bytecode meanwhile.
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"rolemesh"}
    for part in ("controller/main.py", "rollout/engines/vllm/logging.json"):
        assert (site / "rolemesh/services" / part).read_text() == (ROOT / "services" / part).read_text()
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "from rolemesh.config.placement import TABLES, strategies; print(TABLES, *strategies())",
        ],
        cwd=site,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("values.yaml", "values.schema.json"):  # which `rolemesh check` reads
        assert (site / "rolemesh/chart" / name).read_text() == (ROOT / "charts/rlhf-job" / name).read_text()
    tables = sorted(path.stem for path in (ROOT / "charts" / "rlhf-job" / "placements").glob("*.yaml"))
    assert found.stdout.split() == [str(site / "rolemesh" / "placements"), *tables]
    subprocess.run(
        [sys.executable, "-m", "rolemesh", "configs"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
    )
    assert files(tmp_path / "configs") == files(ROOT / "configs")


def files(folder: Path) -> dict[Path, bytes]:
    """Return the contents of a folder, bytecode apart."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(folder): path.read_bytes() for path in found}
