"""A worker of vLLM's with a model and no engine around it: it takes weights and gives them back.

vLLM changes the process it runs in (threads, process groups), so tests call this in a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm_rollouts import job_of

from rolemesh.models.loading import load_outline, named_weights
from rolemesh.services.rollout.engines.vllm import engine_args
from rolemesh.weights.manifest import lay_out
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.tensors import RegionTensors


def started(model: Path, dtype: str) -> tuple[Any, dict[str, Tensor]]:
    """Load a model; return the worker and the model's weights on the device `meta`."""
    engine_args.prepare_environment(torch.device("cpu"))
    from vllm import AsyncEngineArgs
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    cleanup_dist_env_and_memory()  # the groups of the model before
    engine_args._check_experts = lambda model: None  # what vLLM does not compute it still loads
    job = job_of(model, dtype=dtype)
    outline = load_outline(job.actor.model, "rollout")
    config = AsyncEngineArgs(**engine_args.engine_arguments(job, outline)).create_engine_config()
    wrapper = WorkerWrapperBase(rpc_rank=0)
    address = get_distributed_init_method("127.0.0.1", get_open_port())
    place = {"local_rank": 0, "rank": 0, "distributed_init_method": address, "is_driver_worker": True}
    wrapper.init_worker([{"vllm_config": config, **place}])
    wrapper.init_device()
    wrapper.load_model()
    return wrapper.worker, named_weights(outline)


def updated(model: Path, dtype: str, num_updates: int) -> list[list[str]]:
    """Update a model several times; return after each the names whose weights are not those of the update.

    The publisher casts every other version, and vLLM the others.
    """
    worker, own = started(model, dtype)
    generator = torch.Generator().manual_seed(3)
    kind: torch.dtype = getattr(torch, dtype)
    return [_wrong(worker, _version(own, generator), kind, at % 2 == 0) for at in range(num_updates)]


def refusal(model: Path, lacking: Sequence[str]) -> str:
    """Update a model without some of its weights; return the error."""
    worker, own = started(model, "float32")
    weights = _version(own, torch.Generator().manual_seed(3))
    for name in lacking:
        del weights[name]
    try:
        _take(worker, weights, None)
    except ValueError as error:
        return str(error)
    return ""


def _version(own: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in own.items()}


def _take(worker: Any, weights: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    published = asyncio.run(PublishedWeights(1, weights, dtype=dtype).fetch())
    worker.take_weights(*published.place)


def _wrong(worker: Any, weights: dict[str, Tensor], dtype: torch.dtype, is_cast: bool) -> list[str]:
    _take(worker, weights, dtype if is_cast else None)
    wanted = {name: weight.to(dtype) for name, weight in weights.items()}
    wanted.setdefault("lm_head.weight", wanted["model.embed_tokens.weight"])  # tied
    manifest = lay_out(1, wanted)
    read = RegionTensors(manifest, WeightRegion(manifest.region_bytes))
    found = worker.give_weights(*read.place)
    return [name for name in wanted if name not in found or not torch.equal(read[name], wanted[name])]
