"""The tokens that end a response, and the padding token after its end. All engines must agree on both."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.directory import existing_directory
from rolemesh.models.loading import load_tokenizer

EosIds = int | list[int] | None  # as transformers' configurations declare them


def declared_eos(job: JobConfig, model: Any) -> EosIds:
    """Return the end tokens of a model directory, for an engine that has only an outline of the model."""
    directory = existing_directory(job.actor.model, "rollout")
    if (directory / "generation_config.json").is_file():
        settings: Any = GenerationConfig.from_pretrained(directory, local_files_only=True)
    else:
        settings = model.config.get_text_config()
    declared: EosIds = settings.eos_token_id
    return declared


def end_tokens(job: JobConfig, declared: EosIds) -> tuple[list[int], int]:
    """Return the tokens that end a response (the model's and its tokenizer's), and the padding token.

    Raises:
        InvalidConfig: the model directory names no EOS token.
    """
    tokenizer = load_tokenizer(job.actor.model, "rollout")
    ends = {*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id} - {None}
    if not ends:
        raise InvalidConfig(f"rollout: {job.actor.model.path} names no EOS token")
    pad: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return sorted(ends), pad
