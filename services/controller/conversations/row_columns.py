"""Token ids and columns of the rows of one request, while their conversations run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.graph import node

PROMPT = ("prompts", "prompt_mask")


@dataclass(frozen=True)
class Context:
    """A further context of a row: a prompt that replaced the conversation so far.

    Args:
        number: from 1; the row's own prompt is context 0.
        begin: position in the row of the token after `prompt`.
        prompt: the first ids of the new prompt, at most P. Its other ids are in the row from `begin` on.
        seed: the random stream of tokens sampled in this context.
    """

    number: int
    begin: int
    prompt: Sequence[int]
    seed: int


class Rows:
    """Token ids of each row, with the author, log-probability and weight version of each token.

    Args:
        prompts: the request, B rows.
        num_tokens: T, the limit for all turns of a row together.
        pad: fills responses after a row's end, and prompts before their first token.
    """

    def __init__(self, prompts: DataProto, num_tokens: int, pad: int) -> None:
        shape = (len(prompts), num_tokens)
        self.prompts = prompts
        self.num_tokens = num_tokens
        self.lengths = [0] * len(prompts)
        self._turns = [0] * len(prompts)  # number of the policy's turns so far
        self._rewards = torch.zeros(shape)
        self._columns: dict[str, Tensor] = {
            "responses": torch.full(shape, pad),
            "turns": torch.zeros(shape, dtype=torch.int64),
            "contexts": torch.zeros(shape, dtype=torch.int64),
            "rollout_log_probs": torch.zeros(shape),
            "weight_versions": torch.full(shape, -1),
        }
        self._blank = {name: column[:1].clone() for name, column in self._columns.items()}
        # Copies, because a conversation may set another prompt, and the page still uses its own.
        self._prompts = {name: prompts[name].clone() for name in PROMPT}
        self._pad = pad
        self._contexts: dict[int, Context] = {}  # the current context of each row that has several

    def room(self, row: int) -> int:
        """Return the number of tokens that still fit into a row."""
        return self.num_tokens - self.lengths[row]

    def request(self, rows: Sequence[int]) -> DataProto:
        """Return a request for the next turn of these rows.

        It has the columns `responses` and `turns` even for the first turn, so an engine keeps keys and values
        for the next turn. A row with several contexts is sent with its current one only.
        """
        asked = self.prompts.select_columns(["seeds"]).select_idxs(torch.tensor(rows))
        for name, column in self._prompts.items():
            asked[name] = column[list(rows)]
        for name in ("responses", "turns"):
            asked[name] = self._columns[name][list(rows)]
        for at, row in enumerate(rows):
            if (context := self._contexts.get(row)) is not None:
                length = self.lengths[row] - context.begin
                for name in ("responses", "turns"):
                    asked[name][at] = self._blank[name][0]
                    asked[name][at, :length] = self._columns[name][row, context.begin : self.lengths[row]]
                _fill(asked["prompts"][at], asked["prompt_mask"][at], context.prompt, self._pad)
                asked["seeds"][at] = context.seed
        return asked

    @property
    def prompt_tokens(self) -> int:
        """P, the width of a prompt."""
        return int(self._prompts["prompts"].shape[1])

    def set_prompt(self, row: int, ids: Sequence[int]) -> None:
        """Replace the prompt of a row without responses by these ids, at most `prompt_tokens`."""
        _fill(self._prompts["prompts"][row], self._prompts["prompt_mask"][row], ids, self._pad)

    def begin_context(self, row: int, ids: Sequence[int]) -> None:
        """Begin a context with these ids, fewer than `room`: the policy sees them instead of the row so far.

        They are appended as tokens that the policy did not sample. Each context has its own random stream,
        because its positions repeat those of earlier contexts.
        """
        number = 1 + (self._contexts[row].number if row in self._contexts else 0)
        first = ids[: self.prompt_tokens]
        stream = np.random.SeedSequence([int(self.prompts["seeds"][row]) % 2**64, number])
        seed = int(stream.generate_state(1, np.uint64)[0] >> 1)
        self._contexts[row] = Context(number, self.lengths[row] + len(first), first, seed)
        self.append(row, ids)

    def num_contexts(self, row: int) -> int:
        """Return the number of contexts of a row."""
        return 1 + (self._contexts[row].number if row in self._contexts else 0)

    def length(self, row: int) -> int:
        """Return the number of tokens in the row's current context, including its prompt."""
        if (context := self._contexts.get(row)) is not None:
            return len(context.prompt) + self.lengths[row] - context.begin
        return int(self._prompts["prompt_mask"][row].sum()) + self.lengths[row]

    def prompt(self, row: int) -> list[int]:
        """Return the ids of a row's first prompt."""
        ids: list[int] = self._prompts["prompts"][row][self._prompts["prompt_mask"][row].bool()].tolist()
        return ids

    def append_turn(self, row: int, answer: DataProto, at: int) -> list[int]:
        """Append a turn of the policy, up to the row's room, and return its ids.

        Args:
            row: index of the row.
            answer: from the rollout, with the new tokens at their positions in the row.
            at: index of the row in `answer`.
        """
        new = answer["response_mask"][at].nonzero().flatten()[: self.room(row)]
        here = slice(self.lengths[row], self.lengths[row] + len(new))
        for name, column in answer.tensors.items():
            if name in ("row", "response_mask"):
                continue
            if name not in self._columns:  # kept_ids
                blank = column.new_full((1, *column.shape[1:]), -1)
                self._blank[name] = blank
                self._columns[name] = blank.repeat(len(self.prompts), *[1] * (column.dim() - 1))
            self._columns[name][row, here] = column[at, new]
        self._turns[row] += 1
        self._columns["turns"][row, here] = self._turns[row]
        self._columns["contexts"][row, here] = self.num_contexts(row) - 1
        ids: list[int] = answer["responses"][at, new].tolist()
        self.lengths[row] += len(ids)
        return ids

    def drop_last(self, row: int, num_tokens: int) -> None:
        """Drop the last tokens of a row."""
        end = self.lengths[row]
        for name, column in self._columns.items():
            column[row, end - num_tokens : end] = self._blank[name][0, end - num_tokens : end]
        self.lengths[row] -= num_tokens

    def append(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample, after its last turn."""
        begin = self.lengths[row]
        end = self.lengths[row] + len(ids)
        self._columns["responses"][row, begin:end] = torch.tensor(ids)
        self._columns["turns"][row, begin:end] = -(self._turns[row] + 1)
        self._columns["contexts"][row, begin:end] = self.num_contexts(row) - 1
        self.lengths[row] = end

    def reward(self, row: int, reward: float) -> None:
        """Add a reward to the last token that the policy sampled."""
        sampled = (self._columns["turns"][row] > 0).nonzero()
        self._rewards[row, sampled[-1, 0]] += reward

    def reset(self, row: int) -> None:
        """Drop everything but the original prompt, to restart the conversation."""
        for name, column in self._columns.items():
            column[row] = self._blank[name][0]
        for name, prompts in self._prompts.items():
            prompts[row] = self.prompts[name][row]
        self._contexts.pop(row, None)
        self._rewards[row] = 0
        self.lengths[row] = self._turns[row] = 0

    def answer(self, rows: Sequence[int], facts: Sequence[Mapping[str, str | float]]) -> DataProto:
        """Return finished rows as `generate` does, with `turns`, `environment_rewards` and `conversation`.

        They also have the columns of their prompts, because a conversation may have set another prompt.

        Args:
            rows: indices of the rows.
            facts: for each row, numbers about its conversation, and why it ended.
        """
        at = list(rows)
        columns = {name: column[at] for name, column in (self._prompts | self._columns).items()}
        sampled = DataProto({"row": torch.tensor(at), **columns, "response_mask": columns["turns"] > 0})
        extra = {name: sampled.tensors.pop(name) for name in ("turns", "contexts")}
        return with_conversations(sampled, extra | {"environment_rewards": self._rewards[at]}, facts)


@node(
    reads=("row", "responses", "response_mask"),
    writes=("turns", "contexts", "environment_rewards", "conversation"),
)
def with_conversations(
    batch: DataProto, extra: Mapping[str, Tensor], facts: Sequence[Mapping[str, str | float]]
) -> DataProto:
    """Add the further columns of conversations: turns, contexts, environment_rewards [B, T], and facts about
    each."""
    return batch.union(DataProto.from_dict(dict(extra), {"conversation": [dict(each) for each in facts]}))


def _fill(prompt: Tensor, mask: Tensor, ids: Sequence[int], pad: int) -> None:
    """Write ids left-padded into a row's prompt [P], and set its mask."""
    begin = len(prompt) - len(ids)
    prompt[:begin], prompt[begin:] = pad, torch.tensor(ids)
    mask[:begin], mask[begin:] = False, True
