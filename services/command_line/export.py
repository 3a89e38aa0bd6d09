"""Implements `rolemesh export`."""

from __future__ import annotations

from pathlib import Path

import typer

from rolemesh.config.model import ModelConfig
from rolemesh.errors import ModelNotFound
from rolemesh.models.saving import export
from rolemesh.services.controller.run.checkpoints import Checkpoints

MODEL_FILES = ("config.json", "adapter_config.json")


def export_and_show(
    source: Path,
    out: Path,
    *,
    checkpoint: str,
    role: str,
    dtype: str,
    max_shard_size: str,
    base: str,
    trust_remote_code: bool,
) -> None:
    """Export a model, and print what was written. Raises as directory_of and export do."""
    directory = directory_of(source, checkpoint, role)
    base_model = ModelConfig(path=base, trust_remote_code=trust_remote_code)
    done = export(directory, out, dtype=dtype, max_shard_size=max_shard_size, base=base_model)
    files = "one file" if done.num_files == 1 else f"{done.num_files} files"
    typer.echo(
        f"{out}: {done.num_parameters:,} parameters in {dtype}, {done.num_bytes / 2**20:,.1f} MiB in {files}, "
        f"from {directory}. Read again, it gives the same logits; they differ from the checkpoint's by at most "
        f"{done.difference:.2g}."
    )


def directory_of(source: Path, checkpoint: str, role: str) -> Path:
    """Return the directory of a model or an adapter.

    Args:
        source: this directory, or a checkpoint or a run that has it.
        checkpoint: of a run: latest, best or a step.
        role: of a checkpoint.

    Raises:
        ModelNotFound: there is none.
        CheckpointFailed: as Checkpoints.latest.
    """
    if _is_model(source):
        return source
    found: Path | None = source
    if not (source / "controller.json").is_file():
        checkpoints = Checkpoints(source)
        by_name = {"latest": checkpoints.latest, "best": checkpoints.best}
        find = by_name.get(checkpoint, lambda: source / f"global_step_{checkpoint}")
        found = find()
    if found is None or not _is_model(found / role):
        steps = Checkpoints(source).steps()
        has = f"it has checkpoints of steps {steps}" if steps else "it has no checkpoints"
        raise ModelNotFound(
            f"{source}: found no model of role {role} in its checkpoint {checkpoint!r}; {has}. Expected a run, "
            f"a checkpoint, or a directory with {' or '.join(MODEL_FILES)}"
        )
    return found / role


def _is_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in MODEL_FILES)
