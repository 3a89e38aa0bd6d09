"""Finds and checks a model's directory. Does not import torch, because `rolemesh plan` uses it."""

from __future__ import annotations

import json
from pathlib import Path

from rolemesh import hub
from rolemesh.config.model import ModelConfig
from rolemesh.errors import ModelNotFound, unreadable

ADAPTER_FILE = "adapter_config.json"  # by which peft, and then transformers, recognises an adapter


def existing_directory(config: ModelConfig, role: str, files: hub.Patterns | None = None) -> Path:
    """Return the directory of a role's model: its path, or of a Hub name the snapshot in the Hub's cache.

    Args:
        config: the role's model section, with its path filled in.
        role: for the message, e.g. "actor".
        files: of a Hub name: patterns of the files that the cache must have; None: all of a model.

    Raises:
        ModelNotFound: no path is given, the directory does not exist, or the cache lacks files of the Hub name.
            The message has commands that create or fetch one.
    """
    if not config.path:
        raise ModelNotFound(f"{role}: no model directory is given; set {role}.model.path")
    if hub.is_name(config.path):
        return hub_directory(config, role, files)
    directory = Path(config.path)
    if not directory.is_dir():
        raise ModelNotFound(
            f"{role}: no such model directory: {directory}. It is not a name of the Hugging Face Hub either, "
            f"which is ORGANISATION/MODEL. `rolemesh model {directory}` makes a small random one, and "
            "`rolemesh demo` makes the one of configs/tiny.yaml"
        )
    if config.revision:
        raise ModelNotFound(
            f"{role}: model.revision is {config.revision}, but {directory} is a directory; only a Hub name has "
            "revisions"
        )
    return directory


def hub_directory(
    config: ModelConfig, role: str, files: hub.Patterns | None = None, *, fetch: bool = False
) -> Path:
    """Return the snapshot of a model with a Hub name.

    Args:
        config, role, files: as of existing_directory.
        fetch: download what the cache lacks; of one process, before the roles start.

    Raises:
        ModelNotFound, HubUnavailable: as hub.snapshot.
    """
    wanted = hub.model_files(config.trust_remote_code) if files is None else files
    repository = hub.Repository(config.path, config.revision)
    return hub.snapshot(repository, wanted, f"{role}.model.path", fetch=fetch)


def described_directory(config: ModelConfig, role: str, *, weights: bool = False) -> Path:
    """Return the directory of a role's model, checked to have a config.json, and no adapter beside it.

    Args:
        config, role: as of existing_directory.
        weights: of a Hub name, the cache must have all files, and not the configuration alone.

    Raises:
        ModelNotFound: as existing_directory, or there is no config.json, or an adapter: transformers would add
            it to the model in some places, and not in others.
    """
    files = None if weights else hub.configuration_files(config.trust_remote_code)
    directory = existing_directory(config, role, files)
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"{role}: {directory} is not a Hugging Face model directory: it has no config.json")
    if (directory / ADAPTER_FILE).is_file():
        raise ModelNotFound(
            f"{role}: {directory} has both a model and an adapter ({ADAPTER_FILE}); move the adapter's files "
            "to a directory of their own, from which actor.model.lora_adapter_path starts"
        )
    return directory


def weight_files(directory: Path) -> list[Path]:
    """Return the files with a model's weights: `model.safetensors`, or those of its index, or none.

    Others beside them are not the model's, e.g. `consolidated.safetensors`, the same weights under other names.

    Raises:
        ModelNotFound: the index is damaged, or names a file elsewhere.
    """
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if single.is_file() or not index.is_file():
        return [single] if single.is_file() else []
    try:
        names = sorted({str(name) for name in json.loads(index.read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise unreadable(ModelNotFound, error, f"{index} cannot be read: {error!r}") from error
    if strange := [name for name in names if Path(name).name != name]:
        raise ModelNotFound(f"{index} names {strange[0]!r}, which is not a file beside it")
    return [directory / name for name in names]
