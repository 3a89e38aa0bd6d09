"""From prompts to experience: rows fan out, responses come back as they finish, each chunk is judged while
others still generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import torch

from rolemesh.config.rollout import CHUNKS_PER_BATCH
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch
from rolemesh.graph import node
from rolemesh.tasks import closed_at_end

R = TypeVar("R")


@node(reads=("prompts",), writes=("seeds",))
def fan_out(
    prompts: DataProto, n: int, seed: int, step: int, sampling: str = "train", first: int = 0
) -> DataProto:
    """Every prompt n times, one after the other, each row with a random stream of its own.

    Args:
        prompts: one row for each prompt.
        n: responses to each prompt.
        seed: of the job's sampling.
        step: the step; 0 for validation, which draws the same numbers each time, so that two validations
            differ by the model alone.
        sampling: "train", "greedy" or "validation", for the rollout.
        first: position of the first prompt, where these are a part of those of the step.

    Returns:
        [B = prompts * n] rows with `seeds`, a pure function of (seed, step, position, sample): nothing random
        has state, so a resumed run and a repeated call draw what the first one drew. meta_info says `sampling`
        and `step`.
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
    """Runs `experience` on responses as they finish, and puts the results into the order of `rows`.

    Args:
        finished: batches of finished rows, from `Rollout.generate(rows)`.
        rows: what was asked.
        experience: from rows with responses to rows with everything that is learnt from. A row's result must
            not depend on the rows beside it, so that the result is the same however the chunks fall.

    Raises:
        InvalidBatch: a row came twice, or not at all.
        Exception: the first error of the stream or of an experience; the stream is then closed, and every
            other call is cancelled.
    """
    chunk_rows = -(-len(rows) // CHUNKS_PER_BATCH)
    calls: list[asyncio.Task[DataProto]] = []
    order: list[int] = []
    try:
        async with closed_at_end(finished), asyncio.TaskGroup() as group:
            async for chunk in chunks_of(finished, chunk_rows):
                order += _new_rows(chunk, order, len(rows))
                calls.append(group.create_task(experience(join(rows.select_idxs(chunk["row"]).union(chunk)))))
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
    """The stream's rows in batches of at least `num_rows`; the last may be smaller."""
    waiting: list[DataProto] = []
    async for part in finished:
        waiting.append(part)
        if sum(map(len, waiting)) >= num_rows:
            yield DataProto.concat(waiting)
            waiting = []
    if waiting:
        yield DataProto.concat(waiting)


def _new_rows(chunk: DataProto, seen: list[int], num_rows: int) -> list[int]:
    """Which rows a chunk holds, each for the first time."""
    new: list[int] = chunk["row"].tolist()
    if strange := [row for row in new if not 0 <= row < num_rows]:
        raise InvalidBatch(f"the rollout returned rows {strange}; it was asked for rows 0 to {num_rows - 1}")
    if len(set(new)) < len(new) or set(new) & set(seen):
        raise InvalidBatch(f"the rollout returned a row twice; rows {sorted(new)} came after {sorted(seen)}")
    return new


@node(
    reads=("row", "prompts", "prompt_mask", "responses", "response_mask"),
    writes=("input_ids", "attention_mask", "position_ids"),
)
def join(batch: DataProto) -> DataProto:
    """Prompt and response as one sequence [B, S]; positions count from the first prompt token."""
    attention_mask = torch.cat([batch["prompt_mask"], batch["response_mask"]], dim=1).to(torch.int64)
    batch["input_ids"] = torch.cat([batch["prompts"], batch["responses"]], dim=1)
    batch["attention_mask"] = attention_mask
    batch["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    return batch
