"""PromptDataset: turns rows of a data set into batches of tokenised prompts."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from rolemesh.catalog.agents import AGENTS, ONE_TURN
from rolemesh.config.data import DataConfig
from rolemesh.config.reward import RewardConfig
from rolemesh.data.message_cells import as_read, is_chat, unwritten
from rolemesh.data.order import Rows, permutation
from rolemesh.data.progress_bar import track
from rolemesh.data.row_source import load_rows
from rolemesh.data.templates import check_template, writes_arguments_as_text
from rolemesh.data.texts import padding_token
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidData
from rolemesh.rules.checking import check_ground_truth
from rolemesh.rules.sources import UnknownDataSource, rule_of
from rolemesh.wire.json_text import to_json

logger = logging.getLogger(__name__)

TOKENISE_AT_ONCE = 512  # prompts per call; the tokenizer processes a list in parallel


@dataclass(frozen=True)
class Agents:
    """What a data set knows of the job's agents.

    Args:
        default: the agent of rows without agent_name.
        tools: that each agent offers, as OpenAI's API takes them; prompts describe them.
    """

    default: str
    tools: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


class PromptDataset:
    """The prompts of a data set. All are tokenised at the start, so that a bad row fails early.

    Args:
        files: data.train_files or data.val_files, in verl's layout. Their columns may differ.
        config: keys, lengths, truncation, filter, limits.
        tokenizer: a Hugging Face tokenizer with a chat template.
        split: "train" or "val"; the prefix of every uid. Selects train_max_samples or val_max_samples.
        agents: of a job with conversations, whose rows have an agent_name; None: a row has one turn.
        scored: whether rows have the columns by which responses are scored; False: only the prompt is read.
        reward: how responses are scored; a row that cannot be scored so is an error. None: they are not scored.

    Raises:
        InvalidData: a file or a row is unusable, or no row is left. The message names file, row and column.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        config: DataConfig,
        tokenizer: Any,
        *,
        split: Literal["train", "val"] = "train",
        agents: Agents | None = None,
        scored: bool = True,
        reward: RewardConfig | None = None,
    ) -> None:
        check_template(tokenizer, config.apply_chat_template_kwargs)
        self._as_text = writes_arguments_as_text(tokenizer, config.apply_chat_template_kwargs)
        self.config = config
        self.split = split
        self._agents = agents
        self._scored = scored
        self._reward = reward
        self.pad_id = padding_token(tokenizer)
        self._source = load_rows(files, config, split, "prompts" if scored else "bare prompts")
        self._most_characters = config.max_prompt_length * longest_token(tokenizer)
        limit = config.train_max_samples if split == "train" else config.val_max_samples
        positions = limited(len(self._source), limit, config)
        self._rows: list[dict[str, Any]] = []
        self._ids: list[NDArray[np.int32]] = []  # takes an eighth of the memory of a list of int
        self.positions: list[int] = []  # in the files
        for position, row, num_characters, ids in self._tokenised(positions, tokenizer):
            if (kept := self._within_length(position, num_characters, ids)) is not None:
                self._rows.append(row)
                self._ids.append(np.array(kept, np.int32))
                self.positions.append(position)
        self.num_filtered = len(positions) - len(self._ids)
        self.left_out = left_out(len(self._source), len(positions), self.num_filtered, split)
        if self.num_filtered:
            logger.info(
                "%s: filtered out %d of %d prompts, longer than data.max_prompt_length %d",
                split, self.num_filtered, len(positions), config.max_prompt_length,
            )  # fmt: skip
        if not self._ids:
            raise InvalidData(
                f"none of the {len(positions)} prompts in {[str(f) for f in files] or config.dataset} is "
                f"within data.max_prompt_length {config.max_prompt_length}"
            )

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def agents(self) -> set[str]:
        """The agents of the rows of a job with conversations."""
        return {row["agent_name"] for row in self._rows} if self._agents else set()

    @cached_property
    def digest(self) -> str:
        """Digest of all prompts in token ids, and so of their messages, the template and the tokenizer."""
        return digest_of(self.positions, self._ids)

    @cached_property
    def columns_digest(self) -> str:
        """Digest of the other columns of all rows: what rewards, tools and interactions read.

        The order of keys does not count. Values that JSON does not have count by their type alone.
        """
        digest = hashlib.sha256()
        for row in self._rows:
            text = json.dumps(self._other_columns([row]), sort_keys=True, default=_plain)
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()[:16]

    def batch(self, indices: Sequence[int] | Rows) -> DataProto:
        """Return the prompts at these indices as a batch.

        Its columns are prompts [B, P] int64 (left-padded), prompt_mask [B, P] bool, uid; if rows are scored
        data_source, reward_model and extra_info; and in a job with conversations agent_name and messages. A uid
        is the split and the row's position in the files: "train-000012".
        """
        width = self.config.max_prompt_length
        ids = [self._ids[index] for index in indices]
        mask = np.arange(width) >= width - np.array([len(row) for row in ids], np.int64)[:, None]
        prompts = np.full(mask.shape, self.pad_id, np.int64)
        prompts[mask] = np.concatenate([np.zeros(0, np.int32), *ids])
        rows = [self._rows[index] for index in indices]
        return DataProto.from_dict(
            {"prompts": torch.from_numpy(prompts), "prompt_mask": torch.from_numpy(mask)},
            {
                "uid": [f"{self.split}-{self.positions[index]:06d}" for index in indices],
                **self._other_columns(rows),
            },
        )

    def _other_columns(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        talking = ("agent_name", "messages") if self._agents else ()
        judging = scoring_columns(rows, self.config) if self._scored else {}
        return {**judging, **{name: [row[name] for row in rows] for name in talking}}

    def batches(self, batch_size: int | None = None) -> Iterator[DataProto]:
        """Yield all prompts once, in the files' order; None: as one batch. The last batch may be shorter."""
        size = batch_size or len(self)
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))

    # ------------------------------------------------------------------------------- at start

    def _tokenised(
        self, positions: Rows, tokenizer: Any
    ) -> Iterator[tuple[int, dict[str, Any], int, list[int]]]:
        """Yield position, row without its prompt, the prompt's length in characters and its ids (`_ids_of`)."""
        starts = range(0, len(positions), TOKENISE_AT_ONCE)
        for start in track(starts, f"tokenising {self.split} prompts", len(starts)):
            some = positions[start : start + TOKENISE_AT_ONCE].tolist()
            rows = self._source.rows(some)
            texts = [self._render(*one, tokenizer) for one in zip(some, rows, strict=True)]
            yield from zip(some, rows, map(len, texts), self._ids_of(texts, tokenizer), strict=True)

    def _render(self, position: int, row: dict[str, Any], tokenizer: Any) -> str:
        """Check a row and render its prompt as text; the chat template writes the special tokens."""
        prompt = row[self.config.prompt_key]
        if self._scored:
            check_scoring(row, self.config, self._source.where(position), self._reward)
        if not is_chat(prompt):
            raise self._wrong(
                position,
                self.config.prompt_key,
                f"should hold a list of {{role, content}}, both text; it holds {prompt!r:.200}",
            )
        del row[self.config.prompt_key]  # saves memory: only the ids are needed from here on
        try:
            messages = as_read(prompt, arguments_as_text=self._as_text)
        except InvalidData as error:
            raise self._wrong(position, self.config.prompt_key, str(error)) from None
        tools = self._tools_of(position, row)
        opens = True
        if self._agents:
            row["messages"] = messages
            try:
                to_json(messages, f"{self._source.where(position)}: column {self.config.prompt_key!r}")
            except InvalidBatch as error:
                raise InvalidData(str(error)) from None
            opens = not AGENTS[row["agent_name"]].speaks_first
        try:
            text: str = tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                add_generation_prompt=opens,
                tokenize=False,
                **self.config.apply_chat_template_kwargs,
            )
        except Exception as error:  # the template is the model's code and may raise anything
            why = f"is refused by the chat template: {error}"
            raise self._wrong(position, self.config.prompt_key, why) from error
        if found := unwritten(messages, text):
            raise self._wrong(position, self.config.prompt_key, found)
        return text

    def _tools_of(self, position: int, row: dict[str, Any]) -> list[Mapping[str, Any]]:
        """Return the tools of a row's agent, and fill in its agent_name."""
        agent = row.pop("agent_name", None) or (self._agents.default if self._agents else ONE_TURN)
        if not isinstance(agent, str) or agent not in AGENTS:
            raise self._wrong(position, "agent_name", f"is {agent!r:.100}, {AGENTS.unknown(str(agent))}")
        if self._agents:
            row["agent_name"] = agent
            return list(self._agents.tools.get(agent, ()))
        if AGENTS[agent].converses:
            raise self._wrong(position, "agent_name", f"is {agent}, but rollout.multi_turn.enable is false")
        return []

    def _ids_of(self, texts: list[str], tokenizer: Any) -> list[list[int]]:
        """Tokenise each text.

        A text of more than `_most_characters` has more tokens than a prompt may have. Only that many characters
        at the start, at the end or at both are tokenised: those that data.truncation keeps.
        """
        most = self._most_characters
        ends = self.config.truncation
        cut = [text if len(text) <= most else _ends(text, most, ends) for text in texts]
        ids: list[list[int]] = tokenizer(cut, add_special_tokens=False)["input_ids"]
        for at, text in enumerate(texts):
            # If one token can stand for a longer text (an unknown word), a long prompt may fit after all.
            if len(text) > most and len(ids[at]) <= self.config.max_prompt_length:
                ids[at] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _within_length(self, position: int, num_characters: int, ids: list[int]) -> list[int] | None:
        """Cut the ids as data.truncation says; None if filter_overlong_prompts drops the prompt."""
        limit = self.config.max_prompt_length
        how = self.config.truncation
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


def digest_of(positions: Sequence[int], rows: Iterable[NDArray[np.int32]]) -> str:
    """Return a digest of rows in token ids, and of their positions in the files."""
    digest = hashlib.sha256(np.array(positions, np.int64).tobytes())
    for ids in rows:
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return a NumPy value, which a plug-in's data set may have, as JSON takes it."""
    return value.tolist() if hasattr(value, "tolist") else str(type(value))


def scoring_columns(rows: Sequence[Mapping[str, Any]], config: DataConfig) -> dict[str, list[Any]]:
    """Return the columns data_source, reward_model and extra_info of checked rows; {} for an empty cell."""
    return {
        "data_source": [row[config.reward_fn_key] for row in rows],
        "reward_model": [row[config.reward_model_key] or {} for row in rows],
        "extra_info": [row.get("extra_info") or {} for row in rows],
    }


def check_scoring(
    row: Mapping[str, Any], config: DataConfig, where: str, reward: RewardConfig | None = None
) -> None:
    """Check that a row has the columns by which its responses are scored, and that they can be.

    A rule must be able to use reward_model.ground_truth. A user's function may find the truth elsewhere, such
    as in extra_info.

    Args:
        row: with its columns data_source and reward_model, and extra_info if it has one.
        config: the columns' names.
        where: the row's file and number; the message begins with it.
        reward: how a run scores responses; None: nothing scores them.

    Raises:
        InvalidData: it does not, or they cannot.
    """
    source = row[config.reward_fn_key]
    scored_by = row[config.reward_model_key]
    extra = row.get("extra_info")
    # A struct of nulls comes as {}, and says as little as null.
    scored_by, extra = ({} if cell is None else cell for cell in (scored_by, extra))
    for column, cell, kind in (
        (config.reward_fn_key, source or None, str),
        (config.reward_model_key, scored_by, dict),
        ("extra_info", extra, dict),
    ):
        if not isinstance(cell, kind):
            raise InvalidData(
                f"{where}: column {column!r} should hold a {kind.__name__}; it holds {row[column]!r:.200}"
            )
    try:
        for column, cell in ((config.reward_model_key, scored_by), ("extra_info", extra)):
            to_json(cell, f"{where}: column {column!r}")
    except InvalidBatch as error:  # a data set of a plug-in may hold anything
        raise InvalidData(str(error)) from None
    if not_a_number := [k for k, v in scored_by.items() if isinstance(v, float) and math.isnan(v)]:
        raise InvalidData(
            f"{where}: column {config.reward_model_key!r} has NaN as {not_a_number[0]!r}; expected a value"
        )
    if reward is None:
        return
    if scored_by.get("style") == "model":
        if not reward.reward_model.enable:
            raise InvalidData(
                f"{where}: column {config.reward_model_key!r} has style 'model', but "
                "reward.reward_model.enable is false; set it to true, or style to 'rule'"
            )
    elif reward.rules_score:
        _check_for_a_rule(source, scored_by.get("ground_truth"), config, where, reward)


def _check_for_a_rule(
    source: str, ground_truth: Any, config: DataConfig, where: str, reward: RewardConfig
) -> None:
    try:
        rule = rule_of(source, reward)
    except UnknownDataSource as error:
        raise InvalidData(f"{where}: column {config.reward_fn_key!r}: {error}") from None
    try:
        check_ground_truth(rule, ground_truth, reward)
    except ValueError as error:
        raise InvalidData(
            f"{where}: column {config.reward_model_key!r} has no ground_truth that {source}'s rule {rule} can "
            f"compare responses with: {error}. Correct it, or set reward.custom_reward_function.path to a "
            "function that reads it, or finds it elsewhere"
        ) from None


def longest_token(tokenizer: Any) -> int:
    """Length of the longest token in characters; for a byte-level tokenizer in bytes, which are no fewer."""
    return max(map(len, tokenizer.get_vocab()))


def _ends(text: str, num_characters: int, truncation: str) -> str:
    """Keep `num_characters` at the start, at the end or at both, wherever `truncation` keeps tokens."""
    if truncation == "left":
        return text[-num_characters:]
    return text[:num_characters] + (text[-num_characters:] if truncation == "middle" else "")


def limited(num_rows: int, limit: int, config: DataConfig) -> Rows:
    """Choose at most `limit` rows (-1: all), and return their positions in the files' order.

    These are the first rows, or with data.shuffle a seeded sample, which represents a sorted file as a whole.
    """
    if limit < 0 or limit >= num_rows:
        return np.arange(num_rows)
    if limit == 0:
        raise InvalidData("data.train_max_samples or data.val_max_samples is 0, which leaves no rows")
    return np.sort(permutation(num_rows, config.seed, 0)[:limit]) if config.shuffle else np.arange(limit)


def left_out(num_rows: int, num_chosen: int, num_filtered: int, split: str) -> str:
    """Say how many rows of a file are left out, and by which keys; empty: none.

    Args:
        num_rows: of all files.
        num_chosen: those that `limited` chose.
        num_filtered: longer prompts among them.
        split: "train" or "val".
    """
    counts = {
        f"data.{split}_max_samples": num_rows - num_chosen,
        "data.filter_overlong_prompts": num_filtered,
    }
    reasons = ", ".join(f"{count} by {key}" for key, count in counts.items() if count)
    return f"left out of {num_rows} rows: {reasons}" if reasons else ""
