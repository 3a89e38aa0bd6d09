"""What every reader of a model's directory asks of it first. `rolemesh plan` does so without torch."""

from __future__ import annotations

from pathlib import Path

from rolemesh.config.model import ModelConfig
from rolemesh.errors import ModelNotFound


def existing_directory(config: ModelConfig, role: str) -> Path:
    """The directory of a role's model.

    Args:
        config: the role's model section, its path filled in.
        role: for the message, e.g. "actor".

    Raises:
        ModelNotFound: none is given, or there is none; with the commands that make one.
    """
    if not config.path:
        raise ModelNotFound(f"{role}: no model directory is given; set {role}.model.path")
    directory = Path(config.path)
    if not directory.is_dir():
        raise ModelNotFound(
            f"{role}: no such model directory: {directory}. `rolemesh model {directory}` makes a small random "
            f"one, `hf download ORGANISATION/MODEL --local-dir {directory}` fetches a real one, and "
            "`rolemesh demo` makes that of configs/tiny.yaml"
        )
    return directory


def described_directory(config: ModelConfig, role: str) -> Path:
    """The same, and it has a config.json.

    Raises:
        ModelNotFound: what is missing, and where.
    """
    directory = existing_directory(config, role)
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"{role}: {directory} is not a Hugging Face model directory: it has no config.json")
    return directory
