"""PairDataset: turns pairs of responses, of which one was chosen, into batches for preference training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rolemesh.data.message_cells import Message, is_chat
from rolemesh.data.supervised import Ids, LearnedMessages, Row, RowsWithResponses, cell


class PairDataset(RowsWithResponses):
    """Rows of two conversations, which begin alike: the chosen one, and the rejected one in a context of its
    own. So whatever shuffles, shards or cuts rows keeps a pair together, and a prompt is computed once where
    padding is removed (docs/decisions/0023-a-pair-is-a-row.md).

    A row of the files has a prompt (text or messages), and chosen and rejected (text, or the messages after
    the prompt). Or chosen and rejected are whole conversations: their common beginning is the prompt, and holds
    that of the row if it has one. The arguments are those of RowsWithResponses.
    """

    layout = "pairs"

    def _conversations(self, position: int, row: Mapping[str, Any]) -> list[LearnedMessages]:
        config = self.config
        keys = config.chosen_key, config.rejected_key
        prompt: list[Message] = []
        if (given := cell(row, config.prompt_key)) not in (None, "", []):
            prompt = self._chat(position, config.prompt_key, given, "user")
        sides = [self._chat(position, key, cell(row, key), "assistant" if prompt else "") for key in keys]
        if not prompt or all(side[0].get("role") != "assistant" for side in sides):
            stated = prompt
            prompt = _common(*sides)
            if not _holds(prompt, stated):
                raise self._wrong(
                    position,
                    config.prompt_key,
                    f"is not in the messages with which both {keys[0]!r} and {keys[1]!r} begin. Correct it; or "
                    "set data.prompt_key to a name that no column has, and their beginning is the prompt",
                )
            sides = [side[len(prompt) :] for side in sides]
        if sides[0] == sides[1]:
            return []  # the loss is log 2 whatever the policy is, so there is nothing to learn
        for key, side in zip(keys, sides, strict=True):
            if not prompt or not side or side[0].get("role") != "assistant":
                raise self._wrong(
                    position,
                    key,
                    f"should hold the assistant's answer after a prompt; it has {side!r:.200}",
                )
        self._check_prompt(position, config.prompt_key if given else keys[0], prompt)
        return [
            LearnedMessages(key, [*prompt, *side], len(prompt)) for key, side in zip(keys, sides, strict=True)
        ]

    def _chat(self, position: int, key: str, value: Any, role: str) -> list[Message]:
        """Return the messages of a cell. Text is one message of this role; without a role it is refused."""
        if isinstance(value, str) and value and role:
            return [{"role": role, "content": value}]
        if not is_chat(value):
            wanted = "text or messages" if role else "a conversation, as the row has no prompt"
            raise self._wrong(position, key, f"should hold {wanted}; it holds {value!r:.200}")
        return self._messages(position, key, value)

    def _row(self, position: int, conversations: list[tuple[Ids, Ids]]) -> Row | None:
        """Join the pair; None if it is too long and filter_overlong_prompts drops it."""
        (chosen, chosen_turns), (rejected, rejected_turns) = conversations
        ids = np.concatenate([chosen, rejected])
        later = rejected_turns + np.sign(rejected_turns) * chosen_turns.max()
        turns = np.concatenate([chosen_turns, later])
        contexts = np.repeat(np.arange(2, dtype=np.int32), [len(chosen), len(rejected)])
        begin = self._begin(turns)
        if len(ids) - begin <= self.config.max_response_length:
            return Row(ids, turns, contexts, begin)
        if self.config.filter_overlong_prompts:
            return None
        way_out = "or set data.filter_overlong_prompts to leave such rows out"
        raise self._too_long(position, len(ids), begin, way_out)


def _common(a: list[Message], b: list[Message]) -> list[Message]:
    """Return the messages with which both begin."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def _holds(messages: list[Message], some: list[Message]) -> bool:
    """Return whether `some` occur in `messages`, one after another."""
    return any(messages[at : at + len(some)] == some for at in range(len(messages) - len(some) + 1))
