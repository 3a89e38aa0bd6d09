"""A small job for engine openai, its responses, and the model's log-probabilities of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rolemesh.config.job import JobConfig, make_job
from rolemesh.dataproto import DataProto
from rolemesh.models.loading import load_causal_lm, named_weights
from rolemesh.services.rollout.worker import RolloutWorker

P, T, MAX_LOGPROBS = 12, 96, 24


def job_of(model: Path, urls: list[str], weights_dir: Path, **rollout: Any) -> JobConfig:
    engine = rollout.pop("name", "openai")
    openai = {"urls": urls, "weights_dir": str(weights_dir), **rollout.pop("openai", {})}
    servers = {"openai": openai} if engine == "openai" else {}
    return make_job(
        {
            "actor": {"model": {"path": str(model)}},
            "data": {"max_prompt_length": P, "max_response_length": rollout.pop("tokens", T)},
            "rollout": {"name": engine, "temperature": 1.0, **servers, **rollout},
        }
    )


@contextmanager
def worker_of(*args: Any, **rollout: Any) -> Iterator[RolloutWorker]:
    worker = RolloutWorker(job_of(*args, **rollout))
    try:
        yield worker
    finally:
        worker.close()


def prompts_of(rows: int, sampling: str = "train") -> DataProto:
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(P) >= P - torch.randint(1, P + 1, (rows,), generator=generator)[:, None]
    ids = torch.randint(0, 256, (rows, P), generator=generator).where(mask, 256)
    return DataProto(
        {"prompts": ids, "prompt_mask": mask, "seeds": torch.arange(rows) * 7919 - 5},
        {},
        {"sampling": sampling},
    )


def changed(model: Path, scale: float) -> Any:
    """Load the model and change its weights. After an update, responses must come from the new weights."""
    other = load_causal_lm(make_job({"actor": {"model": {"path": str(model)}}}).actor.model, "actor")
    generator = torch.Generator().manual_seed(int(1000 * scale))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return other


def weights(model: Any) -> Mapping[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(model).items()}


@torch.no_grad()
def log_probs_of(model: Any, prompts: DataProto, rows: DataProto, temperature: float = 1.0) -> Tensor:
    """Compute log-probs [B, T] with transformers, row by row; renormalised over kept_ids if there are any."""
    result = torch.zeros(rows["responses"].shape)
    for i in range(len(rows)):
        n = int(rows["response_mask"][i].sum())
        prompt = prompts["prompts"][i][prompts["prompt_mask"][i]]
        response = rows["responses"][i, :n]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        log_probs = logits.log_softmax(-1)
        drawn = log_probs.gather(-1, response[:, None])[:, 0]
        if "kept_ids" in rows:
            kept = rows["kept_ids"][i, :n].long()
            drawn -= log_probs.gather(-1, kept.clamp(min=0)).where(kept >= 0, -torch.inf).logsumexp(-1)
        result[i, :n] = drawn
    return result


def assert_are_the_models(model: Any, prompts: DataProto, rows: DataProto, **sampling: float) -> None:
    expected = log_probs_of(model, prompts, rows, **sampling)
    torch.testing.assert_close(rows["rollout_log_probs"], expected, atol=1e-4, rtol=0)
