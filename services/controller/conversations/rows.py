"""The rows of one request while their conversations grow."""

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
    """A prompt that took the place of all that a row had.

    Args:
        number: from 1; the row's own prompt is context 0.
        begin: which token of the row follows `prompt`.
        prompt: its first ids, as many as a prompt may have. The rest stands in the row.
        seed: of what is sampled from here on.
    """

    number: int
    begin: int
    prompt: Sequence[int]
    seed: int


class Rows:
    """Token ids of each row, who wrote each, and what is known of it.

    Args:
        prompts: the request, of B rows.
        num_tokens: T, for all turns of a row together.
        pad: the id beyond a row's end.
    """

    def __init__(self, prompts: DataProto, num_tokens: int, pad: int) -> None:
        shape = (len(prompts), num_tokens)
        self.prompts, self.num_tokens = prompts, num_tokens
        self.lengths = [0] * len(prompts)
        self._turns = [0] * len(prompts)  # of the policy so far
        self._rewards = torch.zeros(shape)
        self._columns: dict[str, Tensor] = {
            "responses": torch.full(shape, pad),
            "turns": torch.zeros(shape, dtype=torch.int64),
            "contexts": torch.zeros(shape, dtype=torch.int64),
            "rollout_log_probs": torch.zeros(shape),
            "weight_versions": torch.full(shape, -1),
        }
        self._blank = {name: column[:1].clone() for name, column in self._columns.items()}
        # Copies, because the page goes on using its own: a conversation may bring another prompt.
        self._prompts = {name: prompts[name].clone() for name in PROMPT}
        self._pad = pad
        self._replaced: dict[int, Context] = {}  # of rows whose prompt another one has taken the place of

    def room(self, row: int) -> int:
        """Return how many tokens a row may still have."""
        return self.num_tokens - self.lengths[row]

    def request(self, rows: Sequence[int]) -> DataProto:
        """Return a request for the next turn of these rows.

        It has what the rows are so far, also if that is nothing: an engine then keeps what it computes. Of a
        row with several contexts it has the last one.
        """
        asked = self.prompts.select_columns(["seeds"]).select_idxs(torch.tensor(rows))
        for name, column in self._prompts.items():
            asked[name] = column[list(rows)]
        for name in ("responses", "turns"):
            asked[name] = self._columns[name][list(rows)]
        for at, row in enumerate(rows):
            if (context := self._replaced.get(row)) is not None:
                length = self.lengths[row] - context.begin
                for name in ("responses", "turns"):
                    asked[name][at] = self._blank[name][0]
                    asked[name][at, :length] = self._columns[name][row, context.begin : self.lengths[row]]
                _fill(asked["prompts"][at], asked["prompt_mask"][at], context.prompt, self._pad)
                asked["seeds"][at] = context.seed
        return asked

    @property
    def prompt_tokens(self) -> int:
        """P, for the prompt of a row."""
        return int(self._prompts["prompts"].shape[1])

    def bring(self, row: int, ids: Sequence[int]) -> None:
        """Take these ids, at most `prompt_tokens`, as the prompt of a row that has nothing yet."""
        _fill(self._prompts["prompts"][row], self._prompts["prompt_mask"][row], ids, self._pad)

    def replace(self, row: int, ids: Sequence[int]) -> None:
        """Let the policy see these ids, fewer than `room`, in place of all that the row has.

        They are appended, as tokens that the policy did not sample. What a row samples after them has a random
        stream of its own, as it stands at positions that were drawn for before.
        """
        number = 1 + (self._replaced[row].number if row in self._replaced else 0)
        first = ids[: self.prompt_tokens]
        stream = np.random.SeedSequence([int(self.prompts["seeds"][row]) % 2**64, number])
        seed = int(stream.generate_state(1, np.uint64)[0] >> 1)
        self._replaced[row] = Context(number, self.lengths[row] + len(first), first, seed)
        self.append(row, ids)

    def num_contexts(self, row: int) -> int:
        """Return how many prompts a row has had."""
        return 1 + (self._replaced[row].number if row in self._replaced else 0)

    def length(self, row: int) -> int:
        """Return how many tokens the policy sees of a row, its prompt included."""
        if (context := self._replaced.get(row)) is not None:
            return len(context.prompt) + self.lengths[row] - context.begin
        return int(self._prompts["prompt_mask"][row].sum()) + self.lengths[row]

    def prompt(self, row: int) -> list[int]:
        """Return the ids of a row's first prompt."""
        ids: list[int] = self._prompts["prompts"][row][self._prompts["prompt_mask"][row].bool()].tolist()
        return ids

    def take(self, row: int, answer: DataProto, at: int) -> list[int]:
        """Append a turn of the policy, as far as there is room, and return its ids.

        Args:
            row: the row.
            answer: of the rollout, in which new tokens stand where they belong.
            at: which row of it.
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

    def cut(self, row: int, num_tokens: int) -> None:
        """Forget the last tokens of a row."""
        end = self.lengths[row]
        for name, column in self._columns.items():
            column[row, end - num_tokens : end] = self._blank[name][0, end - num_tokens : end]
        self.lengths[row] -= num_tokens

    def append(self, row: int, ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample, after its last turn."""
        begin, end = self.lengths[row], self.lengths[row] + len(ids)
        self._columns["responses"][row, begin:end] = torch.tensor(ids)
        self._columns["turns"][row, begin:end] = -(self._turns[row] + 1)
        self._columns["contexts"][row, begin:end] = self.num_contexts(row) - 1
        self.lengths[row] = end

    def reward(self, row: int, reward: float) -> None:
        """Add a reward to the last token that the policy sampled."""
        sampled = (self._columns["turns"][row] > 0).nonzero()
        self._rewards[row, sampled[-1, 0]] += reward

    def reset(self, row: int) -> None:
        """Forget all but the prompt: the conversation begins anew."""
        for name, column in self._columns.items():
            column[row] = self._blank[name][0]
        for name, prompts in self._prompts.items():
            prompts[row] = self.prompts[name][row]
        self._replaced.pop(row, None)
        self._rewards[row] = 0
        self.lengths[row] = self._turns[row] = 0

    def answer(self, rows: Sequence[int], facts: Sequence[Mapping[str, str | float]]) -> DataProto:
        """Return finished rows as `generate` does, with `turns`, `environment_rewards` and `conversation`.

        They also have the columns of their prompts, which a conversation may have brought.

        Args:
            rows: the rows.
            facts: about the conversation of each.
        """
        at = list(rows)
        columns = {name: column[at] for name, column in (self._prompts | self._columns).items()}
        sampled = DataProto({"row": torch.tensor(at), **columns, "response_mask": columns["turns"] > 0})
        talks = {name: sampled.tensors.pop(name) for name in ("turns", "contexts")}
        return with_conversations(sampled, talks | {"environment_rewards": self._rewards[at]}, facts)


@node(
    reads=("row", "responses", "response_mask"),
    writes=("turns", "contexts", "environment_rewards", "conversation"),
)
def with_conversations(
    batch: DataProto, talks: Mapping[str, Tensor], facts: Sequence[Mapping[str, str | float]]
) -> DataProto:
    """Add what conversations have besides a response: turns, contexts, environment_rewards [B, T], and
    facts about each."""
    return batch.union(DataProto.from_dict(dict(talks), {"conversation": [dict(each) for each in facts]}))


def _fill(prompt: Tensor, mask: Tensor, ids: Sequence[int], pad: int) -> None:
    """Put ids at the end of a row's prompt [P], whose mask is that of its tokens."""
    begin = len(prompt) - len(ids)
    prompt[:begin], prompt[begin:] = pad, torch.tensor(ids)
    mask[:begin], mask[begin:] = False, True
