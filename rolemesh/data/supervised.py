"""Rows with given responses, as batches; SupervisedDataset has one response to a row."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rolemesh.config.data import DataConfig
from rolemesh.data.assistant import Rendered, TurnEnds, render, tokenised
from rolemesh.data.dataset import TOKENISE_AT_ONCE, digest_of, limited
from rolemesh.data.message_cells import Message, as_read, is_chat, unwritten
from rolemesh.data.order import Rows
from rolemesh.data.progress_bar import track
from rolemesh.data.row_source import load_rows
from rolemesh.data.templates import OWN_TEMPLATE, check_template, writes_arguments_as_text
from rolemesh.data.texts import padding_token
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidData

logger = logging.getLogger(__name__)

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class LearnedMessages:
    """Messages, and how many of them are not learned although the assistant may say them."""

    column: str
    messages: list[Message]
    given: int = 0


@dataclass(frozen=True)
class Row:
    """The tokens of a row: of one conversation, or of several in a row, each in a context of its own.

    Args:
        ids: [tokens].
        turns: [tokens], as the column of this name.
        contexts: [tokens], which conversation it is.
        begin: how many tokens are the prompt.
    """

    ids: Ids
    turns: Ids
    contexts: Ids
    begin: int


class RowsWithResponses:
    """Rows with responses. All are tokenised at the start, so that a bad row fails early.

    The first tokens of a row, at most data.max_prompt_length and none that is learned, are its prompt; the rest
    is its response, in which what the assistant says is learned.

    Args:
        files: data.train_files or data.val_files; their schemas may differ.
        config: keys, lengths, truncation, filter, limits.
        tokenizer: a Hugging Face tokenizer with a chat template.
        split: "train" or "val"; the prefix of every uid. Selects train_max_samples or val_max_samples.

    Raises:
        InvalidData: a file or a row is unusable, or no row is left. The message names file, row and column.
    """

    layout: ClassVar[Literal["responses", "pairs"]]
    columns_digest: ClassVar[str | None] = None  # training reads tokens alone

    def __init__(
        self,
        files: Sequence[str | Path],
        config: DataConfig,
        tokenizer: Any,
        *,
        split: Literal["train", "val"] = "train",
    ) -> None:
        self.config = config
        self.split = split
        self._variables = config.apply_chat_template_kwargs
        check_template(tokenizer, self._variables)
        self._as_text = writes_arguments_as_text(tokenizer, self._variables)
        self._ends = TurnEnds(tokenizer)
        # Turns that are learned, and those of them without a token that ends them.
        self._num_turns = self._num_endless = 0
        self.pad_id = padding_token(tokenizer)
        self._source = load_rows(files, config, split, self.layout)
        limit = config.train_max_samples if split == "train" else config.val_max_samples
        positions = limited(len(self._source), limit, config)
        self._rows: list[Row] = []
        self._positions: list[int] = []
        self._sources: list[str] = []
        num_alike = 0
        for position, source, conversations in self._tokenised(positions, tokenizer):
            num_alike += not conversations
            row = self._row(position, conversations) if conversations else None
            if row is not None:
                self._rows.append(row)
                self._positions.append(position)
                self._sources.append(source)
        self.num_filtered = len(positions) - len(self._rows)
        if num_long := self.num_filtered - num_alike:
            logger.info("%s: left out %d of %d rows, too long", split, num_long, len(positions))
        if num_alike:
            logger.warning(
                "%s: left out %d of %d pairs, whose responses are equal", split, num_alike, len(positions)
            )
        if not self._rows:
            of = f"none of the {len(positions)} rows in {[*map(str, files)]}"
            if num_alike:
                raise InvalidData(f"{of} is left: {num_alike} have equal responses, {num_long} are too long")
            raise InvalidData(f"{of} is short enough")
        if self._num_endless:
            logger.warning(
                "%s: the chat template writes no token that ends a response after %d of %d turns of the "
                "assistant, so the model does not learn to end there; add it to the template (%s)",
                split, self._num_endless, self._num_turns, OWN_TEMPLATE,
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def digest(self) -> str:
        """Digest of all rows' tokens and of what is learned of them."""
        joined = (np.concatenate([row.ids, row.turns, row.contexts]) for row in self._rows)
        return digest_of(self._positions, joined)

    def batch(self, indices: Sequence[int] | Rows) -> DataProto:
        """Return the rows at these indices as a batch.

        Its columns are prompts [B, P] and prompt_mask, responses [B, T], response_mask (True on what is
        learned) and turns, uid and data_source; of pairs contexts, too.
        """
        prompt = self.config.max_prompt_length
        response = self.config.max_response_length
        size = len(indices)
        prompts, responses = (np.full((size, width), self.pad_id, np.int64) for width in (prompt, response))
        mask = np.zeros((size, prompt), bool)
        turns, contexts = np.zeros((2, size, response), np.int64)
        for number, index in enumerate(indices):
            row = self._rows[index]
            begin = row.begin
            end = len(row.ids) - row.begin
            prompts[number, prompt - begin :] = row.ids[:begin]
            mask[number, prompt - begin :] = True
            responses[number, :end] = row.ids[begin:]
            turns[number, :end] = row.turns[begin:]
            contexts[number, :end] = row.contexts[begin:]
        columns = {"prompts": prompts, "prompt_mask": mask, "responses": responses, "turns": turns}
        columns |= {"response_mask": turns > 0} | ({"contexts": contexts} if self.layout == "pairs" else {})
        return DataProto.from_dict(
            {name: torch.from_numpy(column) for name, column in columns.items()},
            {
                "uid": [f"{self.split}-{self._positions[index]:06d}" for index in indices],
                "data_source": [self._sources[index] for index in indices],
            },
        )

    def batches(self, batch_size: int | None = None) -> Iterator[DataProto]:
        """Yield all rows once, in the files' order; None: as one batch. The last batch may be shorter."""
        size = batch_size or len(self)
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    # ------------------------------------------------------------------------------- at start

    def _conversations(self, position: int, row: Mapping[str, Any]) -> list[LearnedMessages]:
        """Return the conversations of a row of the files; none leaves it out."""
        raise NotImplementedError

    def _row(self, position: int, conversations: list[tuple[Ids, Ids]]) -> Row | None:
        """Join the ids and turns of a row's conversations; None leaves it out."""
        raise NotImplementedError

    def _tokenised(self, positions: Rows, tokenizer: Any) -> Iterator[tuple[int, str, list[tuple[Ids, Ids]]]]:
        """Yield position and data source of each row, and ids and turns of its conversations."""
        starts = range(0, len(positions), TOKENISE_AT_ONCE)
        for start in track(starts, f"tokenising {self.split} rows", len(starts)):
            some = positions[start : start + TOKENISE_AT_ONCE].tolist()
            rows = self._source.rows(some)
            by_row = [self._conversations(position, row) for position, row in zip(some, rows, strict=True)]
            rendered = [
                self._rendered(position, row, each, tokenizer)
                for position, row, conversations in zip(some, rows, by_row, strict=True)
                for each in conversations
            ]
            found = iter(tokenised(tokenizer, rendered) if rendered else ())
            for position, row, conversations in zip(some, rows, by_row, strict=True):
                made = [(each, next(found)) for each in conversations]
                source = str(row.get(self.config.reward_fn_key) or "data")
                yield position, source, [self._learned(position, each, *ids) for each, ids in made]

    def _rendered(self, position: int, row: Mapping[str, Any], of: LearnedMessages, tokenizer: Any) -> Rendered:
        tools = self._tools(position, row)
        try:
            rendered = render(tokenizer, of.messages, tools, self._variables, self._ends)
        except InvalidData as error:
            raise self._wrong(position, of.column, f"cannot be used: {error}") from error
        if found := unwritten(of.messages, rendered.text):
            raise self._wrong(position, of.column, found)
        given = sum(message.get("role") == "assistant" for message in of.messages[: of.given])
        learned = rendered.ended[given:]
        self._num_turns += len(learned)
        self._num_endless += learned.count(False)
        return rendered

    def _messages(self, position: int, column: str, messages: Sequence[Message]) -> list[Message]:
        """Return messages as the template reads them."""
        try:
            return as_read(messages, arguments_as_text=self._as_text)
        except InvalidData as error:
            raise self._wrong(position, column, str(error)) from None

    def _check_prompt(self, position: int, column: str, prompt: Sequence[Message]) -> None:
        """Refuse a prompt that ends with the assistant's turn: the response would be its next, not its rest."""
        if prompt[-1].get("role") == "assistant":
            raise self._wrong(
                position,
                column,
                "ends with a turn of the assistant, and a response would be another turn after it; put this "
                "turn's text at the beginning of the response",
            )

    def _tools(self, position: int, row: Mapping[str, Any]) -> list[Message]:
        """Return the tools of a row: a list of JSON schemas.

        The list or each schema may be JSON text, since schemas of different shapes have no common Parquet type.
        """
        given = row.get(self.config.tools_key)
        try:
            tools = (json.loads(given) if isinstance(given, str) and given else given) or []
            if isinstance(tools, list):
                tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
        except (ValueError, RecursionError):
            tools = None
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise self._wrong(
                position,
                self.config.tools_key,
                f"should hold a list of JSON schemas, or this list as JSON text; it holds {given!r:.200}",
            )
        return tools

    def _learned(self, position: int, of: LearnedMessages, ids: list[int], turns: list[int]) -> tuple[Ids, Ids]:
        """Return the ids and turns of a conversation, without the turns that are given."""
        given = sum(message.get("role") == "assistant" for message in of.messages[: of.given])
        counted = np.array([_without(turn, given) for turn in turns], np.int32)
        if not (counted[1:] > 0).any():
            raise self._wrong(position, of.column, "has no turn of the assistant; there is nothing to learn")
        return np.array(ids, np.int32), counted

    def _begin(self, turns: Ids) -> int:
        """Return how many tokens of a row are its prompt: those before the first that is learned, at most P."""
        learned = np.flatnonzero(turns[1:] > 0)
        before = int(learned[0]) + 1 if len(learned) else len(turns)
        return min(before, self.config.max_prompt_length)

    def _too_long(self, position: int, num_tokens: int, begin: int, way_out: str) -> InvalidData:
        longest = self.config.max_response_length
        allowed = f"{num_tokens - begin} of them after its prompt; data.max_response_length is {longest}"
        if self.config.max_length is not None:
            allowed = f"data.max_length is {self.config.max_length}"
        return self._wrong(
            position,
            "",
            f"is {num_tokens} tokens, {allowed}. Raise it, {way_out}",
        )

    def _wrong(self, position: int, column: str, problem: str) -> InvalidData:
        of = f"column {column!r} " if column else ""
        return InvalidData(f"{self._source.where(position)}: {of}{problem}")


class SupervisedDataset(RowsWithResponses):
    """Rows of one conversation: `messages`, or a prompt (text or messages) and a response (text).

    The arguments are RowsWithResponses'.
    """

    layout = "responses"

    def _conversations(self, position: int, row: Mapping[str, Any]) -> list[LearnedMessages]:
        config = self.config
        if row.get(config.messages_key) is not None:
            column = config.messages_key
            messages = row[config.messages_key]
        else:
            column = config.response_key
            prompt = cell(row, config.prompt_key)
            response = cell(row, column)
            if not isinstance(response, str) or not response:
                raise self._wrong(position, column, f"should hold text; it holds {response!r:.200}")
            if isinstance(prompt, str) and prompt:
                prompt = [{"role": "user", "content": prompt}]
            elif not is_chat(prompt):
                raise self._wrong(
                    position, config.prompt_key, f"should hold text or messages; it holds {prompt!r:.200}"
                )
            self._check_prompt(position, config.prompt_key, prompt)
            messages = [*prompt, {"role": "assistant", "content": response}]
        if not is_chat(messages):
            raise self._wrong(
                position, column, f"should hold a list of {{role, content}}; it holds {messages!r:.200}"
            )
        return [LearnedMessages(column, self._messages(position, column, messages))]

    def _row(self, position: int, conversations: list[tuple[Ids, Ids]]) -> Row | None:
        """Cut the conversation as data.truncation says.

        None if filter_overlong_prompts drops the row, or nothing that is learned is left of it.
        """
        [(ids, turns)] = conversations
        config = self.config
        longest = self.config.max_response_length
        begin = self._begin(turns)
        if len(ids) - begin > longest:
            if config.filter_overlong_prompts:
                return None
            if config.truncation == "right":
                kept = slice(begin + longest)
            elif config.truncation == "left":
                room = config.max_prompt_length + longest
                fits = len(turns[-room:]) - self._begin(turns[-room:]) <= longest
                kept = slice(-room if fits else -longest - 1, None)
            else:
                way_out = (
                    "set data.filter_overlong_prompts to leave such rows out, or data.truncation to left or "
                )
                raise self._too_long(position, len(ids), begin, way_out + "right")
            ids = ids[kept]
            turns = turns[kept]
        return Row(ids, turns, 0 * turns, self._begin(turns)) if (turns[1:] > 0).any() else None


def _without(turn: int, given: int) -> int:
    """Number a token's turn anew, if the assistant's first turns are not learned."""
    if abs(turn) <= given or -turn == given + 1:
        return -1
    return turn - given if turn > 0 else turn + given


def cell(row: Mapping[str, Any], key: str) -> Any:
    """Return what a row has at a key, which may be a path as in extra_info.answer; None if it has nothing."""
    if key in row:
        return row[key]
    column, _, rest = key.partition(".")
    inner = row.get(column)
    return cell(inner, rest) if rest and isinstance(inner, Mapping) else None
