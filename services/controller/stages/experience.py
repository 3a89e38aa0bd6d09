"""Collects experience: repeats prompts, receives responses as they finish, and processes each chunk at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import torch

from rolemesh.config import JobConfig
from rolemesh.config.rollout import CHUNKS_PER_BATCH
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.graph import node
from rolemesh.tasks import closed_at_end
from rolemesh.token_mask import token_mask

R = TypeVar("R")


@node(reads=("prompts",), writes=("seeds",))
def fan_out(
    prompts: DataProto, n: int, seed: int, step: int, sampling: str = "train", first: int = 0
) -> DataProto:
    """Repeat every prompt n times, in adjacent rows, and give each row its own random stream.

    Args:
        prompts: one row for each prompt.
        n: responses to each prompt.
        seed: rollout.seed.
        step: the step. It is 0 for validation, so all validations draw the same numbers and differ only by the
            model.
        sampling: "train", "greedy" or "validation", for the rollout.
        first: position of the first prompt in the step, if these are only a part of the step's prompts.

    Returns:
        [B = prompts * n] rows with `seeds`, a pure function of (seed, step, position, sample). There is no
        random state, so a resumed run or a repeated call draws the same numbers. meta_info has `sampling` and
        `step`.
    """
    rows = prompts.repeat(n)
    rows.meta_info |= {"sampling": sampling, "step": step}
    streams = [np.random.Philox(np.random.SeedSequence((seed % 2**64, step, sample))) for sample in range(n)]
    words = [stream.random_raw(first + len(prompts))[first:] >> 1 for stream in streams]  # by position
    rows["seeds"] = torch.from_numpy(np.stack(words, axis=1).astype(np.int64).ravel())
    return rows


async def collect(
    finished: AsyncIterator[DataProto],
    rows: DataProto,
    experience: Callable[[DataProto], Coroutine[Any, Any, DataProto]],
) -> DataProto:
    """Run `experience` on responses as they finish, and return the results in the order of `rows`.

    Args:
        finished: batches of finished rows, from `Rollout.generate(rows)`.
        rows: the requested rows.
        experience: adds everything that training needs to rows with responses. A row's result must not depend
            on other rows, so that the result does not depend on the chunks.

    Raises:
        InvalidBatch: a row came twice, or not at all, or was not requested.
        Exception: the first error of the stream or of `experience`. The stream is then closed, and all other
            calls are cancelled.
    """
    chunk_rows = -(-len(rows) // CHUNKS_PER_BATCH)
    calls: list[asyncio.Task[DataProto]] = []
    order: list[int] = []
    try:
        async with closed_at_end(finished), asyncio.TaskGroup() as group:
            async for chunk in chunks_of(finished, chunk_rows):
                order += _new_rows(chunk, order, len(rows))
                asked = rows.select_idxs(chunk["row"])
                # A conversation may bring another prompt, which then stands in place of the requested one.
                asked = asked.select_columns([name for name in asked.columns if name not in chunk.columns])
                calls.append(group.create_task(experience(join(asked.union(chunk)))))
            if missing := set(range(len(rows))) - set(order):
                raise InvalidBatch(
                    f"rows {sorted(missing)[:8]} of {len(rows)} never came back from the rollout"
                )
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    batch = DataProto.concat([call.result() for call in calls])
    batch.reorder(torch.tensor(order).argsort())
    return batch.select_columns([name for name in batch.columns if name != "row"])


async def chunks_of(finished: AsyncIterator[DataProto], num_rows: int) -> AsyncIterator[DataProto]:
    """Yield the stream's rows in batches of at least `num_rows`; the last may be smaller."""
    waiting: list[DataProto] = []
    async for part in finished:
        waiting.append(part)
        if sum(map(len, waiting)) >= num_rows:
            yield DataProto.concat(waiting)
            waiting = []
    if waiting:
        yield DataProto.concat(waiting)


def _new_rows(chunk: DataProto, seen: list[int], num_rows: int) -> list[int]:
    """Return the rows of a chunk, checked to be requested and new."""
    new: list[int] = chunk["row"].tolist()
    if strange := [row for row in new if not 0 <= row < num_rows]:
        raise InvalidBatch(f"the rollout returned rows {strange}; it was asked for rows 0 to {num_rows - 1}")
    if len(set(new)) < len(new) or set(new) & set(seen):
        raise InvalidBatch(f"the rollout returned a row twice; rows {sorted(new)} came after {sorted(seen)}")
    return new


def _joined(job: JobConfig) -> tuple[str, ...]:
    talks: tuple[str, ...] = ("turns", "contexts")
    if job.page.learns_from == "prompts":
        talks = talks if job.rollout.multi_turn.enable else ()
    elif job.page.learns_from == "responses":
        talks = ("turns",)
    return (
        *(("row",) if job.generates else ()),
        "prompts",
        "prompt_mask",
        "responses",
        "response_mask",
        *talks,
    )


@node(reads=_joined, writes=("input_ids", "attention_mask", "position_ids"))
def join(batch: DataProto) -> DataProto:
    """Join prompt and response to one sequence [B, S].

    Positions count from the first token of the prompt, and from the first token of each that took its place: so
    a token attends to its own context alone (rolemesh/models/sequence.py).
    """
    attention_mask = torch.cat([batch["prompt_mask"], token_mask(batch)], dim=1).to(torch.int64)
    batch["input_ids"] = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    batch["attention_mask"] = attention_mask
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    if "contexts" in batch:
        context = torch.cat([torch.zeros_like(batch["prompts"]), batch["contexts"]], dim=1)
        begins = torch.zeros_like(positions)
        begins[:, 1:] = torch.where(context[:, 1:] > context[:, :-1], positions[:, 1:], 0)
        positions = positions - begins.cummax(dim=1).values
    batch["position_ids"] = positions
    return batch
