"""Decodes responses into the texts that reward functions, dumps and generated files show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ResponseTexts:
    """Decodes responses without special tokens, or with all of them but those of the end and of padding.

    Attributes:
        tokenizer: the policy's.

    Args:
        tokenizer: the policy's, loaded from its directory.
        skip_special_tokens: leave all special tokens out (`reward.skip_special_tokens`).
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._unseen = frozenset[int]() if skip_special_tokens else end_and_padding(tokenizer)

    def __call__(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each response, given as token ids without the padding of its batch."""
        seen = ids if self._skip else [[token for token in row if token not in self._unseen] for row in ids]
        return self.whole(seen)

    def whole(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence, also of the end tokens between the messages of a prompt."""
        if not ids:
            return []  # transformers takes an empty list for one sequence without tokens
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=self._skip)
        return texts


def end_and_padding(tokenizer: Any) -> frozenset[int]:
    """Return the ids that end or pad a response."""
    return end_tokens(tokenizer) | ({tokenizer.pad_token_id} - {None})


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids that end a response: the tokenizer's, and those that its directory declares."""
    declared = declared_ends(Path(tokenizer.name_or_path)) if tokenizer.name_or_path else []
    return frozenset[int]().union(*declared, {tokenizer.eos_token_id} - {None})


def declared_ends(directory: Path) -> list[frozenset[int]]:
    """Return the ids that a model directory declares to end a response, by generation_config.json and by
    config.json.

    The former has several in many chat models. A file that is not there declares none. The library's classes
    are not asked: some have an id by default, which is any token in another vocabulary.
    """
    found = []
    for name in ("generation_config.json", "config.json"):
        ids: set[Any] = set()
        file = directory / name
        settings = json.loads(file.read_bytes()) if file.is_file() else {}
        for part in (settings, settings.get("text_config") or {}):
            declared = part.get("eos_token_id")
            ids |= set(declared) if isinstance(declared, list) else {declared}
        found.append(frozenset(ids - {None}))
    return found


def padding_token(tokenizer: Any) -> int:
    """Return the id that fills what is masked: the tokenizer's padding, else an end of responses, else any."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return (
        min(end_tokens(tokenizer), default=0) if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
    )
