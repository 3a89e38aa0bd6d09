"""Reads the rows of a file with lists of responses, and makes batches of them for the reward role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset
from rolemesh.data.dataset import check_scoring, left_out, limited, scoring_columns
from rolemesh.data.files import FileRows, keys_of_columns
from rolemesh.data.texts import ResponseTexts
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidData
from rolemesh.hub import data_file
from rolemesh.models.loading import vocabulary_in
from rolemesh.services.controller.offline.generation import IDS, RESPONSES

PROMPTS_AT_ONCE = 64


class ResponseRows:
    """The rows of data.val_files, each with as many responses as the others.

    Reward functions get the texts as they are. Only a reward model reads token ids, and the penalty of long
    responses (overlong_buffer) counts them: those of the column response_ids, as `rolemesh generate` writes it,
    and else the text's, with the token that ends a response.

    Args:
        job: names the files, the columns and the lengths.
        tokenizer: the policy's.
        response_key: the column with the responses.

    Raises:
        InvalidData: a file or a row is unusable. The message names file, row and column.
    """

    def __init__(self, job: JobConfig, tokenizer: Any, response_key: str) -> None:
        config = self._config = job.data.model_copy(update={"dataset": "parquet", "options": {}})
        self._job = job
        self._tokenizer = tokenizer
        self._key = response_key
        self._texts = ResponseTexts(tokenizer, skip_special_tokens=job.reward.skip_special_tokens)
        self._end: int = tokenizer.eos_token_id or 0  # without one, any token counts as the last
        self._vocabulary = vocabulary_in(job.actor.model, "actor")
        self._by_model = job.reward.reward_model.enable
        self._by_tokens = self._by_model or job.reward.overlong_buffer.enable
        required = tuple(dict.fromkeys((response_key, config.reward_fn_key, config.reward_model_key)))
        ids = (IDS,) if self._by_tokens and response_key == RESPONSES else ()
        keys = {**keys_of_columns(config), response_key: "--response-key"}
        files = [data_file(file) for file in config.val_files]
        self._source = FileRows(files, required, ("extra_info", *ids), keys)
        self._prompts: PromptDataset | None = None  # only a reward model sees them
        if self._by_model:
            self._prompts = PromptDataset(config.val_files, config, tokenizer, split="val")
            self._positions = self._prompts.positions
            self.left_out = self._prompts.left_out
        else:
            self._positions = limited(len(self._source), config.val_max_samples, config).tolist()
            self.left_out = left_out(len(self._source), len(self._positions), 0, "val")
        self.n = self._check()

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._positions)

    def parts(self) -> Iterator[range]:
        """Yield the prompts of each call, in the files' order."""
        for start in range(0, len(self), PROMPTS_AT_ONCE):
            yield range(start, min(start + PROMPTS_AT_ONCE, len(self)))

    def _check(self) -> int:
        """Check all rows, and return how many responses each has."""
        n = 0
        for at in self.parts():
            positions = self._positions[at.start : at.stop]
            for position, row in zip(positions, self._source.rows(positions), strict=True):
                where = self._source.where(position)
                texts = row[self._key]
                check_scoring(row, self._config, where, self._job.reward)
                if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
                    raise InvalidData(
                        f"{where}: column {self._key!r} should hold a list of texts, the responses; it holds "
                        f"{texts!r:.200}. --response-key names another column"
                    )
                n = n or len(texts)
                if len(texts) != n:
                    raise InvalidData(
                        f"{where}: column {self._key!r} has {len(texts)} responses, but "
                        f"{self._source.where(self._positions[0])} has {n}; every row needs as many"
                    )
        return n

    def batch(self, at: range) -> DataProto:
        """Return n rows for each of these prompts, with the columns that the reward role reads.

        Raises:
            InvalidData: token ids that are needed are not those of the texts, or too many.
        """
        positions = self._positions[at.start : at.stop]
        rows = self._source.rows(positions)
        n = self.n
        width = self._config.max_response_length
        count = len(at) * self.n
        responses = torch.full((count, width), self._end, dtype=torch.int64)
        mask = torch.zeros((count, width), dtype=torch.bool)
        for i, (position, row) in enumerate(zip(positions, rows, strict=True)):
            for j, ids in enumerate(self._ids_of(row, self._source.where(position))):
                responses[i * n + j, : len(ids)] = torch.tensor(ids)
                mask[i * n + j, : len(ids)] = True
        if self._prompts:
            prompts = self._prompts.batch(at)
        else:
            one = torch.zeros((len(at), self._config.max_prompt_length), dtype=torch.int64)
            is_last = torch.arange(one.shape[1]).expand(one.shape) == one.shape[1] - 1
            prompts = DataProto.from_dict(
                {"prompts": one, "prompt_mask": is_last},
                {
                    "uid": [f"val-{position:06d}" for position in positions],
                    **scoring_columns(rows, self._config),
                },
            )
        batch = prompts.repeat(n)
        batch["responses"], batch["response_mask"] = responses, mask
        batch["response_texts"] = [text for row in rows for text in row[self._key]]
        return batch

    def _ids_of(self, row: dict[str, Any], where: str) -> list[list[int]]:
        """Return the token ids of a row's responses; one id each if nothing counts or reads tokens."""
        texts = row[self._key]
        if not self._by_tokens:
            return [[self._end]] * len(texts)
        width = self._config.max_response_length
        if (given := row.get(IDS)) is not None:
            self._check_ids(given, texts, where)
            return list(given)
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        ids = [[*each, self._end] for each in encoded]
        if self._by_model and (longest := max(map(len, ids))) > width:
            raise InvalidData(
                f"{where}: column {self._key!r} has a response of {longest} tokens, but "
                f"data.max_response_length is {width}, and the reward model reads all; raise it"
            )
        return [each[:width] for each in ids]  # longer responses get the penalty of this length

    def _check_ids(self, given: Any, texts: Sequence[str], where: str) -> None:
        fits = isinstance(given, list) and len(given) == len(texts)
        vocabulary = self._vocabulary
        width = self._config.max_response_length
        for ids in given if fits else ():
            fits = fits and isinstance(ids, list) and 0 < len(ids) <= width
            fits = fits and all(isinstance(token, int) and 0 <= token < vocabulary for token in ids)
        if not fits:
            raise InvalidData(
                f"{where}: column {IDS!r} should hold {len(texts)} lists of 1 to {width} token ids "
                f"(data.max_response_length) below {vocabulary}; it holds {given!r:.200}"
            )
        if self._texts(given) != list(texts):
            raise InvalidData(
                f"{where}: the tokens in column {IDS!r} are not those of {self._key!r}; drop the column, and "
                "the texts are tokenized"
            )
