"""The tokens that end a response, and the padding token after its end. All engines must agree on both."""

from __future__ import annotations

from rolemesh.config import JobConfig
from rolemesh.data.texts import declared_ends, padding_token
from rolemesh.errors import InvalidConfig
from rolemesh.models.directory import existing_directory
from rolemesh.models.loading import load_tokenizer


def end_tokens(job: JobConfig) -> tuple[list[int], int]:
    """Return the tokens that end a response, and the padding token.

    The former are those of generation_config.json, or else of config.json, and the tokenizer's.

    Raises:
        InvalidConfig: none of them names an EOS token, so every response would have the full length.
    """
    directory = existing_directory(job.actor.model, "rollout")
    tokenizer = load_tokenizer(job.actor.model, "rollout")
    declared = next(filter(None, declared_ends(directory)), frozenset())
    ends = declared | ({tokenizer.eos_token_id} - {None})
    if not ends:
        raise InvalidConfig(
            f"rollout: {directory} names no EOS token, so every response would have data.max_response_length "
            "tokens; set eos_token_id in its generation_config.json, or eos_token in its tokenizer_config.json"
        )
    return sorted(ends), padding_token(tokenizer)
