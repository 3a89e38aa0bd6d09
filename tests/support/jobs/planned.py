"""A job and a model for tests of the planner, and groupings of its roles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.planner.device_specs import GPUS, Device
from rolemesh.planner.estimate import Cluster, Planner
from rolemesh.planner.search import as_grouping
from rolemesh.planner.shapes import ModelShape

# Llama-2-7B: https://arxiv.org/abs/2307.09288
LLAMA_7B = ModelShape(
    body_parameters=32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 32000 * 4096 + 4096,
    head_parameters=32000 * 4096,
    multiplied_parameters=32 * (4 * 4096**2 + 3 * 4096 * 11008),
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    intermediate=11008,
    vocabulary=32000,
)
LLAMA_1B = replace(
    LLAMA_7B, body_parameters=10**9, multiplied_parameters=8 * 10**8, hidden=2048, layers=16, intermediate=5504
)
MODELLED = ("actor", "rollout", "reference", "critic")
H100 = GPUS["h100"]


def ppo(**sections: Any) -> JobConfig:
    half = {"dtype": "bfloat16"}
    base: dict[str, Any] = {
        "algorithm": {"use_kl_in_reward": True},
        "data": {"train_batch_size": 256, "max_prompt_length": 512, "max_response_length": 512},
        "actor": {"model": half, "ppo_mini_batch_size": 128},
        "reference": {"model": half},
        "critic": {"model": half},
        "rollout": half,
    }
    return make_job(merge(base, sections))


def planner(shape: ModelShape = LLAMA_7B, gpus: int = 8, device: Device = H100, **sections: Any) -> Planner:
    return Planner(ppo(**sections), dict.fromkeys(MODELLED, shape), Cluster(device, gpus))


STANDALONE = as_grouping([[role] for role in (*MODELLED, "reward")])
COLLOCATE = {"all": (*MODELLED, "reward")}
HYBRID = {"policy": ("actor", "rollout", "reference"), "value": ("critic", "reward")}
SPLIT = {"policy": ("actor", "reference"), "value": ("critic", "reward"), "rollout": ("rollout",)}
NAMED = {"standalone": STANDALONE, "collocate": COLLOCATE, "hybrid": HYBRID, "split": SPLIT}
