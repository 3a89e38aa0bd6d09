"""Generation alone: responds to all prompts of a file, and writes the responses in parts as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset
from rolemesh.data.texts import ResponseTexts
from rolemesh.dataproto import DataProto
from rolemesh.roles import Rollout
from rolemesh.services.controller.offline.parts import Parts
from rolemesh.services.controller.stages.validation import respond
from rolemesh.tasks import gather

PARTS_AT_ONCE = 64  # at most; a call each

RESPONSES = "responses"
IDS = "response_ids"
LOG_PROBS = "response_log_probs"


async def generate(
    prompts: PromptDataset,
    rollout: Rollout,
    job: JobConfig,
    parts: Parts,
    tokenizer: Any,
    finished: Callable[[int], None],
) -> None:
    """Respond to each prompt as a validation of the same job does, and write the parts that are missing.

    Args:
        prompts: all of them.
        rollout: the only role that is called.
        job: has the sampling parameters.
        parts: where they are written.
        tokenizer: of the responses.
        finished: gets the number of new rows.
    """
    # Twice what the replicas decode at once: they have work while the last rows of a part are generated.
    rows = 2 * job.rows_at_once * job.placement.replicas["rollout"]
    rows_of_part = job.rollout.val_kwargs.n * len(parts.prompts_of(0))
    texts = ResponseTexts(tokenizer, skip_special_tokens=job.reward.skip_special_tokens)
    slots = asyncio.Semaphore(min(PARTS_AT_ONCE, -(-rows // rows_of_part)))

    async def counted(rows: DataProto) -> DataProto:
        finished(len(rows))
        return rows

    async def make(number: int) -> None:
        async with slots:
            at = parts.prompts_of(number)
            batch = await respond(prompts.batch(at), at.start, rollout, job, counted)
            table = response_columns(batch, job.rollout.val_kwargs.n, texts, parts.log_probs)
            await asyncio.to_thread(parts.write, number, table)

    await gather(*(make(number) for number in parts.missing()))


def response_columns(batch: DataProto, n: int, texts: ResponseTexts, log_probs: bool) -> pa.Table:
    """Return the columns that generation adds: a row for each prompt, with a list of its n responses in each.

    Args:
        batch: n rows for each prompt, one after the other.
        n: responses to each prompt.
        texts: decodes them as reward functions see them.
        log_probs: also the engine's log-probability of each token.
    """
    masks = batch["response_mask"]
    ids = [row[mask].tolist() for row, mask in zip(batch["responses"], masks, strict=True)]
    columns = {RESPONSES: (texts(ids), pa.string()), IDS: (ids, pa.list_(pa.int32()))}
    if log_probs:
        rows = [row[mask].tolist() for row, mask in zip(batch["rollout_log_probs"], masks, strict=True)]
        columns[LOG_PROBS] = (rows, pa.list_(pa.float32()))
    return pa.table(
        {
            name: pa.array([cells[at : at + n] for at in range(0, len(cells), n)], pa.list_(kind))
            for name, (cells, kind) in columns.items()
        }
    )
