"""PromptDataset: rows of Parquet files as batches of tokenised prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rolemesh.config.data import DataConfig
from rolemesh.data.order import Rows, permutation
from rolemesh.data.parquet import ParquetRows
from rolemesh.data.progress import track
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidData

logger = logging.getLogger(__name__)

TOKENISE_AT_ONCE = 512  # prompts; the tokenizer works on a list in parallel


class PromptDataset:
    """The prompts of a set of Parquet files, tokenised at once, so that a bad row is an error at start.

    Args:
        files: Parquet files in verl's layout; their schemas may differ.
        config: keys, lengths, truncation, filter, limits.
        tokenizer: a Hugging Face tokenizer with a chat template.
        split: "train" or "val": the first part of every uid, and which limit on rows holds.

    Raises:
        InvalidData: a file or a row is not usable, or no row is left; names file, row and column.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        config: DataConfig,
        tokenizer: Any,
        *,
        split: Literal["train", "val"] = "train",
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidData(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template for the prompts"
            )
        self.config, self.split = config, split
        self.pad_id: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        required = dict.fromkeys((config.prompt_key, config.reward_fn_key, "reward_model"))
        self._source = ParquetRows(files, tuple(required), ("extra_info",))
        self._most_characters = config.max_prompt_length * longest_token(tokenizer)
        limit = config.train_max_samples if split == "train" else config.val_max_samples
        positions = _limited(len(self._source), limit, config)
        self._rows: list[dict[str, Any]] = []
        self._ids: list[NDArray[np.int32]] = []  # an eighth of what lists of int take
        self._positions: list[int] = []
        for position, row, num_characters, ids in self._tokenised(positions, tokenizer):
            if (kept := self._within_length(position, num_characters, ids)) is not None:
                self._rows.append(row)
                self._ids.append(np.array(kept, np.int32))
                self._positions.append(position)
        self.num_filtered = len(positions) - len(self._ids)
        if self.num_filtered:
            logger.info(
                "%s: left out %d of %d prompts longer than data.max_prompt_length %d",
                split, self.num_filtered, len(positions), config.max_prompt_length,
            )  # fmt: skip
        if not self._ids:
            raise InvalidData(
                f"none of the {len(positions)} prompts of {[str(f) for f in files]} is within "
                f"data.max_prompt_length {config.max_prompt_length}"
            )

    def __len__(self) -> int:
        return len(self._ids)

    def batch(self, indices: Sequence[int] | Rows) -> DataProto:
        """Prompts as a batch: prompts [B, P] int64 left-padded, prompt_mask [B, P] bool, uid, data_source,
        reward_model, extra_info. A uid is the split and the row's position in the files: "train-000012"."""
        width = self.config.max_prompt_length
        ids = [self._ids[index] for index in indices]
        mask = np.arange(width) >= width - np.array([len(row) for row in ids], np.int64)[:, None]
        prompts = np.full(mask.shape, self.pad_id, np.int64)
        prompts[mask] = np.concatenate([np.zeros(0, np.int32), *ids])
        rows = [self._rows[index] for index in indices]
        return DataProto.from_dict(
            {"prompts": torch.from_numpy(prompts), "prompt_mask": torch.from_numpy(mask)},
            {
                "uid": [f"{self.split}-{self._positions[index]:06d}" for index in indices],
                "data_source": [row[self.config.reward_fn_key] for row in rows],
                "reward_model": [row["reward_model"] for row in rows],
                "extra_info": [row.get("extra_info") or {} for row in rows],
            },
        )

    def batches(self, batch_size: int | None = None) -> Iterator[DataProto]:
        """All prompts once, in the files' order; the last batch may be shorter. None: all in one."""
        size = batch_size or len(self)
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    # ------------------------------------------------------------------------------- at start

    def _tokenised(
        self, positions: Rows, tokenizer: Any
    ) -> Iterator[tuple[int, dict[str, Any], int, list[int]]]:
        """Position, the row without its prompt, the prompt's characters, and the ids of as many as matter."""
        starts = range(0, len(positions), TOKENISE_AT_ONCE)
        for start in track(starts, f"tokenising {self.split} prompts", len(starts)):
            some = positions[start : start + TOKENISE_AT_ONCE].tolist()
            rows = self._source.rows(some)
            texts = [self._render(*one, tokenizer) for one in zip(some, rows, strict=True)]
            yield from zip(some, rows, map(len, texts), self._ids_of(texts, tokenizer), strict=True)

    def _render(self, position: int, row: dict[str, Any], tokenizer: Any) -> str:
        """The text of a row's prompt, of which the template has written the special tokens."""
        prompt = row[self.config.prompt_key]
        for column, kind in ((self.config.reward_fn_key, str), ("reward_model", dict)):
            if not row[column] or not isinstance(row[column], kind):
                raise self._wrong(
                    position, column, f"should hold a {kind.__name__}; it holds {row[column]!r:.200}"
                )
        if not_a_number := [key for key, value in row["reward_model"].items() if value != value]:
            raise self._wrong(position, "reward_model", f"has no {not_a_number[0]!r}, but NaN")
        if not is_chat(prompt):
            raise self._wrong(
                position,
                self.config.prompt_key,
                f"should hold a list of {{role, content}}, both text; it holds {prompt!r:.200}",
            )
        del row[self.config.prompt_key]  # it is not needed as text again
        # Arrow fills the keys that only other rows' messages have with None; a template may test "is defined".
        messages = [{k: v for k, v in message.items() if v is not None} for message in prompt]
        try:
            text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template may raise anything: it is the model's own code
            said = f"is refused by the chat template: {error}"
            raise self._wrong(position, self.config.prompt_key, said) from error
        return text

    def _ids_of(self, texts: list[str], tokenizer: Any) -> list[list[int]]:
        """Token ids of each text; of a longer one than `_most_characters`, which has more tokens than a prompt
        may have, those of that many characters at the end, or at both, that data.truncation keeps."""
        most, ends = self._most_characters, self.config.truncation
        cut = [text if len(text) <= most else _ends(text, most, ends) for text in texts]
        ids: list[list[int]] = tokenizer(cut, add_special_tokens=False)["input_ids"]
        for at, text in enumerate(texts):
            # Where a token may stand for more than its text (an unknown word), a long prompt may fit after all.
            if len(text) > most and len(ids[at]) <= self.config.max_prompt_length:
                ids[at] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _within_length(self, position: int, num_characters: int, ids: list[int]) -> list[int] | None:
        """The ids cut as data.truncation says; None where filter_overlong_prompts leaves the prompt out."""
        limit, how = self.config.max_prompt_length, self.config.truncation
        if len(ids) <= limit:
            return ids
        if self.config.filter_overlong_prompts:
            return None
        if how == "left":
            return ids[-limit:]
        if how == "right":
            return ids[:limit]
        if how == "middle":
            first = limit // 2
            return ids[:first] + ids[len(ids) - (limit - first) :]
        size = f"{len(ids)} tokens"
        if num_characters > self._most_characters:
            size = (
                f"{num_characters:,} characters, more than {limit} tokens can have ({self._most_characters:,})"
            )
        raise self._wrong(
            position,
            self.config.prompt_key,
            f"is {size}, data.max_prompt_length is {limit}; set data.filter_overlong_prompts or "
            "data.truncation",
        )

    def _wrong(self, position: int, column: str, problem: str) -> InvalidData:
        return InvalidData(f"{self._source.where(position)}: column {column!r} {problem}")


def is_chat(prompt: Any) -> bool:
    """Whether it is a list of messages: each with a role, and content that is text, a list of parts, or none
    where the message has something else to say (tool_calls)."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(message, dict) and _is_message(message) for message in prompt)
    )


def _is_message(message: dict[str, Any]) -> bool:
    role, content = message.get("role"), message.get("content")
    says_else = content is None and any(v is not None for k, v in message.items() if k != "role")
    return bool(role) and isinstance(role, str) and (isinstance(content, str | list) or says_else)


def longest_token(tokenizer: Any) -> int:
    """In characters; of a byte-level one in bytes, which are no fewer."""
    return max(map(len, tokenizer.get_vocab()))


def _ends(text: str, num_characters: int, truncation: str) -> str:
    """As many characters at the beginning, at the end, or at both, as truncation has an eye for."""
    if truncation == "left":
        return text[-num_characters:]
    return text[:num_characters] + (text[-num_characters:] if truncation == "middle" else "")


def _limited(num_rows: int, limit: int, config: DataConfig) -> Rows:
    """Positions of at most `limit` rows (-1: all) in the files' order: the first ones, or with data.shuffle
    a seeded choice, so that a file sorted by source or difficulty is still seen as a whole."""
    if limit < 0 or limit >= num_rows:
        return np.arange(num_rows)
    if limit == 0:
        raise InvalidData("data.train_max_samples or data.val_max_samples is 0, which leaves no rows")
    return np.sort(permutation(num_rows, config.seed, 0)[:limit]) if config.shuffle else np.arange(limit)
