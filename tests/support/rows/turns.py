"""Rows of several turns: what a policy sampled, and what an environment added after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rolemesh.dataproto import DataProto

Generate = Callable[[DataProto], Awaitable[DataProto]]


def continued(prompts: DataProto, responses: Tensor, turns: Tensor) -> DataProto:
    """The request that continues these responses."""
    columns = {**prompts.tensors, "responses": responses, "turns": turns}
    return DataProto(columns, {}, dict(prompts.meta_info))


def first_turn(prompts: DataProto, num_tokens: int) -> DataProto:
    """The request for the first turn of rows that will have others."""
    none = torch.zeros(len(prompts), num_tokens, dtype=torch.int64)
    return continued(prompts, none, none.clone())


def lengths_of(turns: Tensor) -> Tensor:
    return (turns != 0).sum(1)


def with_answer(request: DataProto, answer: DataProto, turn: int) -> DataProto:
    """The rows of a request after the turn that answers it."""
    mask = answer["response_mask"]
    responses = torch.where(mask, answer["responses"], request["responses"])
    return continued(request, responses, torch.where(mask, turn, request["turns"]))


def with_added(request: DataProto, added: Sequence[int], turn: int) -> tuple[DataProto, list[int]]:
    """Adds as many tokens as named to each row after its turn. Leaves out rows without room for these and one
    more.

    Returns:
        the others, and which they are.
    """
    responses, turns = request["responses"].clone(), request["turns"].clone()
    going_on = []
    for row, (begun, count) in enumerate(zip(lengths_of(turns).tolist(), added, strict=True)):
        if begun + count < turns.shape[1]:
            generator = torch.Generator().manual_seed(abs(int(request["seeds"][row])) + turn)
            responses[row, begun : begun + count] = torch.randint(0, 250, (count,), generator=generator)
            turns[row, begun : begun + count] = -(turn + 1)
            going_on.append(row)
    return continued(request, responses, turns)[going_on], going_on


async def conversation(
    prompts: DataProto, num_tokens: int, added: Sequence[Sequence[int]], turns: Sequence[Generate]
) -> list[tuple[DataProto, DataProto]]:
    """Let each of `turns` generate one, with added[k] tokens after turn k + 1. Return requests and answers.

    A conversation ends early if no row has room for another turn.
    """
    request, exchanged = first_turn(prompts, num_tokens), []
    for number, generate in enumerate(turns, 1):
        answer = await generate(request)
        exchanged.append((request, answer))
        if number < len(turns):
            after = with_answer(request, answer, number)
            request, going_on = with_added(after, added[number - 1], number)
            if not going_on:
                break
            added = [[counts[row] for row in going_on] for counts in added]
    return exchanged


def assert_same(found: DataProto, expected: DataProto, names: Mapping[str, Any] | Sequence[str] = ()) -> None:
    """Bit for bit, in all columns or in those named."""
    for name in names or expected.columns:
        assert torch.equal(found[name], expected[name]), name
