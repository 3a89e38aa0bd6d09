"""A small job for rollouts, its prompts, and the responses that a client gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.rpc.calling.clients import RolloutClient

P, T = 6, 10


def job_of(model: Path, **trainer: Any) -> JobConfig:
    return make_job(
        {
            "data": {"train_batch_size": 16, "max_prompt_length": P, "max_response_length": T},
            "trainer": {"device": "cpu", **trainer},
            "actor": {
                "model": {"path": str(model)},
                "ppo_mini_batch_size": 8,
                "ppo_micro_batch_size_per_gpu": 4,
                "optim": {"lr": 1e-3},
            },
            "rollout": {"max_num_seqs": 4},
        }
    )


def prompts_of(rows: int) -> DataProto:
    columns = {"prompts": torch.arange(rows * P).reshape(rows, P) % 250, "seeds": torch.arange(rows) * 7919}
    columns["prompt_mask"] = torch.ones(rows, P, dtype=torch.bool)
    return DataProto(columns, {}, {"sampling": "train"})


async def generated(client: RolloutClient, rows: int = 4) -> DataProto:
    answer = DataProto.concat([batch async for batch in client.generate(prompts_of(rows))])
    assert sorted(answer["row"].tolist()) == list(range(rows))
    return answer[answer["row"].argsort()]
