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
        self.tokenizer, self._skip = tokenizer, skip_special_tokens
        self._unseen = frozenset[int]() if skip_special_tokens else end_and_padding(tokenizer)

    def __call__(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each response, given as token ids without the padding of its batch."""
        seen = ids if self._skip else [[token for token in row if token not in self._unseen] for row in ids]
        return self.whole(seen)

    def whole(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each sequence, also of the end tokens between the messages of a prompt."""
        texts: list[str] = self.tokenizer.batch_decode(ids, skip_special_tokens=self._skip)
        return texts


def end_and_padding(tokenizer: Any) -> frozenset[int]:
    """Return the ids that end or pad a response: the tokenizer's, and those that its directory declares.

    generation_config.json declares several in many chat models. A file that is not there declares none.
    """
    ids = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    for name in ("generation_config.json", "config.json") if tokenizer.name_or_path else ():
        file = Path(tokenizer.name_or_path) / name
        if file.is_file():
            declared = json.loads(file.read_bytes()).get("eos_token_id")
            ids |= set(declared) if isinstance(declared, list) else {declared}
    return frozenset(ids - {None})
