"""Rows for a reward worker, the job that scores them, and their scores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.services.reward.worker import RewardWorker

TOKENIZER = byte_tokenizer()
P, T = 16, 24


def job(model: Path, **reward: Any) -> JobConfig:
    return make_job({
        "actor": {"model": {"path": str(model)}},
        "data": {"max_prompt_length": P, "max_response_length": T},
        "reward": reward,
        "trainer": {"device": "cpu"},
    })  # fmt: skip


def batch(*rows: tuple[str, str, Any], style: str = "rule") -> DataProto:
    """Make rows from (data_source, response, ground_truth); each response gets the end token."""
    prompts, prompt_mask = padded([TOKENIZER(f"ask {i}")["input_ids"] for i in range(len(rows))], P, left=True)
    ids = [[*TOKENIZER(response)["input_ids"], TOKENIZER.eos_token_id] for _, response, _ in rows]
    responses, response_mask = padded(ids, T, left=False)
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "prompt_mask": prompt_mask,
            "responses": responses,
            "response_mask": response_mask,
        },
        {
            "uid": [f"train-{i:06d}" for i in range(len(rows))],
            "data_source": [source for source, _, _ in rows],
            "reward_model": [{"style": style, "ground_truth": truth} for _, _, truth in rows],
            "extra_info": [{"index": i} for i in range(len(rows))],
        },
    )


def padded(ids: list[list[int]], width: int, *, left: bool) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(ids), width), TOKENIZER.pad_token_id)
    mask = torch.zeros((len(ids), width), dtype=torch.bool)
    for row, values in enumerate(ids):
        at = slice(width - len(values), width) if left else slice(0, len(values))
        tokens[row, at], mask[row, at] = torch.tensor(values), True
    return tokens, mask


def custom(tmp_path: Path, source: str) -> dict[str, Any]:
    file = tmp_path / "mine.py"
    file.write_text(source)
    return {"custom_reward_function": {"path": str(file)}}


@asynccontextmanager
async def working(model: Path, **reward: Any) -> AsyncIterator[RewardWorker]:
    worker = RewardWorker(job(model, **reward))
    try:
        yield worker
    finally:
        worker.close()


async def scores(worker: RewardWorker, *responses: str) -> list[float]:
    answered = await worker.compute_scores(batch(*[("mine", response, None) for response in responses]))
    return answered["token_level_scores"].sum(1).tolist()  # type: ignore[no-any-return]
