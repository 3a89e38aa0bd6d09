"""Collects finished rows into a batch: order, chunks and errors. Also: the seeds of requested rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.tasks import gather


def finished(*rows: int) -> DataProto:
    shape = (len(rows), 2)
    return DataProto(
        {
            "row": torch.tensor(rows),
            "responses": torch.tensor(rows)[:, None].expand(shape),
            "response_mask": torch.ones(shape, dtype=torch.bool),
        }
    )


async def stream(*parts: DataProto) -> AsyncIterator[DataProto]:
    for part in parts:
        yield part


async def as_it_is(rows: DataProto) -> DataProto:
    return rows


THREE = DataProto(
    {
        "prompts": torch.tensor([[0, 5], [6, 7], [0, 8]]),
        "prompt_mask": torch.tensor([[False, True], [True, True], [False, True]]),
    }
)


async def test_prompts_and_responses_are_joined_in_request_order() -> None:
    batch = await collect(stream(finished(2), finished(0, 1)), THREE, as_it_is)
    assert batch["input_ids"].tolist() == [[0, 5, 0, 0], [6, 7, 1, 1], [0, 8, 2, 2]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 1, 2]]
    assert "row" not in batch


async def test_finished_rows_are_scored_while_others_still_generate() -> None:
    scored = asyncio.Event()

    async def generates() -> AsyncIterator[DataProto]:
        yield finished(2)
        await scored.wait()
        yield finished(0, 1)

    async def scores(rows: DataProto) -> DataProto:
        scored.set()
        return rows

    batch = await asyncio.wait_for(collect(generates(), THREE, scores), 120)
    assert batch["responses"][:, 0].tolist() == [0, 1, 2]


async def test_rows_are_scored_in_at_most_four_chunks() -> None:
    """Of 9 rows that finish one by one: 3, 3 and 3; of 10 in twos: 4, 4 and 2."""
    for rows, at_once, chunks in ((9, 1, [3, 3, 3]), (10, 2, [4, 4, 2]), (4, 4, [4])):
        scored = []

        async def scores(rows: DataProto, scored: list[int] = scored) -> DataProto:
            scored.append(len(rows))
            return rows

        parts = [finished(*range(at, at + at_once)) for at in range(0, rows, at_once)]
        await collect(stream(*parts), THREE.repeat(4)[:rows], scores)
        assert scored == chunks


async def test_a_refused_row_stops_the_generation_at_the_far_end() -> None:
    closed = False

    async def generates() -> AsyncIterator[DataProto]:
        nonlocal closed
        try:
            for _ in range(2):
                yield finished(0)
        finally:
            closed = True

    with pytest.raises(InvalidBatch, match="a row twice"):
        await collect(generates(), THREE, as_it_is)
    assert closed


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([finished(0, 1)], r"rows \[2\] of 3 never came back"),
        ([finished(0, 1), finished(1, 2)], "a row twice"),
        ([finished(0, 1, 2), finished(3)], r"returned rows \[3\]; it was asked for rows 0 to 2$"),
        ([], r"rows \[0, 1, 2\] of 3 never came back"),
    ],
)
async def test_every_row_comes_exactly_once_or_the_step_fails(parts: list[DataProto], message: str) -> None:
    with pytest.raises(InvalidBatch, match=message):
        await collect(stream(*parts), THREE, as_it_is)


async def test_the_first_error_is_raised_and_cancels_the_other_calls() -> None:
    cancelled = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def fails() -> None:
        raise InvalidBatch("the first")

    with pytest.raises(InvalidBatch, match="the first"):
        await gather(waits(), fails(), waits())
    assert cancelled == [True, True]


def test_seeds_are_a_function_of_seed_step_position_and_sample() -> None:
    def seeds(n: int = 2, seed: int = 1, step: int = 1) -> list[int]:
        return fan_out(THREE, n, seed, step)["seeds"].tolist()

    assert seeds() == seeds()
    assert min(seeds()) >= 0
    others = [*seeds(), *seeds(seed=2), *seeds(step=2), *seeds(seed=2, step=2)]
    assert len(set(others)) == 4 * 6
    # more answers to a prompt leave those that there were
    assert [seed for i, seed in enumerate(seeds(n=3)) if i % 3 < 2] == seeds(n=2)


def test_a_prompts_seeds_do_not_depend_on_its_part_of_the_step() -> None:
    parts = [fan_out(THREE[:1], 2, 1, 0), fan_out(THREE[1:], 2, 1, 0, first=1)]
    assert DataProto.concat(parts)["seeds"].tolist() == fan_out(THREE, 2, 1, 0)["seeds"].tolist()
