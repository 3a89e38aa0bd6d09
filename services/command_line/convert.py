"""Implements `rolemesh model --from-gguf`."""

from __future__ import annotations

from pathlib import Path

import typer

from rolemesh.models.gguf_file import convert_gguf


def convert_and_show(file: Path, out: Path) -> None:
    """Convert a GGUF file, and print what came of it. Raises as convert_gguf does."""
    done = convert_gguf(file, out)
    undone = ", ".join(f"{name} ({count} tensors)" for name, count in done.quantizations.items())
    typer.echo(
        f"{out}: {done.architecture}, {done.num_parameters:,} parameters in float32, from {file}. "
        + (f"Quantisation undone: {undone}." if undone else "Nothing in it was quantised.")
    )
    if not done.has_template:
        typer.echo("It has no chat template: rows with messages need actor.model.custom_chat_template.")
