"""Prompts, responses of engine hf to them, and changed weights for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.services.rollout.worker import RolloutWorker

P, T, EOS, PAD = 12, 16, 258, 256
COLUMNS = ("responses", "response_mask", "rollout_log_probs")


def job_of(model: Path, **rollout: Any) -> JobConfig:
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": P, "max_response_length": T},
            "rollout": {"temperature": 1.0, **rollout},
            "trainer": {"default_local_dir": str(model / "runs")},
        }
    )


def prompts_of(rows: int, sampling: str = "train") -> DataProto:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, P + 1, (rows,), generator=generator)
    lengths[0] = P
    mask = torch.arange(P) >= P - lengths[:, None]
    ids = torch.randint(0, 256, (rows, P), generator=generator).where(mask, PAD)
    return DataProto(
        {"prompts": ids, "prompt_mask": mask, "seeds": torch.arange(rows) * 7919 - 5},
        {},
        {"sampling": sampling},
    )


async def generated(worker: RolloutWorker, prompts: DataProto) -> DataProto:
    """Generate all rows; return them in the order of the request."""
    answer = DataProto.concat([rows async for rows in worker.generate(prompts)])
    assert sorted(answer["row"].tolist()) == list(range(len(prompts)))
    return answer[answer["row"].argsort()]


def trained(model: Path, seed: int = 4) -> Any:
    """Load the directory's model, and change every weight."""
    changed, generator = AutoModelForCausalLM.from_pretrained(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return changed
