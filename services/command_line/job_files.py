"""Writes the job files that come with the package: `rolemesh configs`."""

from __future__ import annotations

from pathlib import Path

from rolemesh.services.controller.run.durably import write_durably

JOB_FILES = Path(__file__).parents[2] / "configs"


def write_job_files(out: Path) -> tuple[int, list[Path]]:
    """Copy every job file and recipe into a folder. Existing files are kept.

    Args:
        out: the folder; made if it is not there.

    Returns:
        How many files were written, and those that were kept although they differ.
    """
    num_written = 0
    kept = []
    for source in sorted(path for path in JOB_FILES.rglob("*") if path.suffix in (".yaml", ".py")):
        content = source.read_bytes()
        target = out / source.relative_to(JOB_FILES)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            write_durably(target, content)
            num_written += 1
        elif not target.is_file() or target.read_bytes() != content:
            kept.append(target)
    return num_written, kept
