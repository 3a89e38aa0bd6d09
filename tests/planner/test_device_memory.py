"""What a job needs on a GPU at least, by hand, and how it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rolemesh.checks.device_memory import least_on_gpu, refuse_what_gpus_cannot_hold
from rolemesh.config import JobConfig
from rolemesh.config.base import merge
from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig
from rolemesh.planner.device_specs import GIB
from rolemesh.planner.memory import Memory
from rolemesh.planner.shapes import ModelShape

# Eight blocks of width 1,024, whose matrices have 10 million parameters each; and a vocabulary of 9,000.
SHAPE = ModelShape(
    body_parameters=90_000_000,
    head_parameters=10_000_000,
    multiplied_parameters=80_000_000,
    hidden=1024,
    layers=8,
    heads=16,
    kv_heads=4,
    head_dim=64,
    intermediate=2048,
    vocabulary=9_000,
)
ROLES = ("actor", "rollout", "reference", "critic", "reward")
SHAPES = dict.fromkeys(ROLES, SHAPE)
POLICY, SCORER = 100_000_000, 90_001_025
WIDTH = 1000  # tokens of a row
CASTS = 2 * 80_000_000
INPUTS = 8 * WIDTH * 1024 * 4  # of eight blocks, in float32
BLOCK = WIDTH * (2 * 1024 * (4 + 4 + 2) + 4 * 1024 * 2 + 4 * 2048 * 2)
PASS = WIDTH * (3 * 1024 * 4 + 3 * 2048 * 2)  # without gradients: residual and norms, and the MLP
CACHE = WIDTH * 2 * 8 * 4 * 64 * 2  # keys and values of one row


def job_of(**sections: Any) -> JobConfig:
    base: dict[str, Any] = {
        "algorithm": {"use_kl_in_reward": True},
        "data": {"train_batch_size": 64, "max_prompt_length": 400, "max_response_length": 600},
        "actor": {"ppo_mini_batch_size": 32, "ppo_micro_batch_size_per_gpu": 8},
        "reward": {"reward_model": {"enable": True}},
    }
    return make_job(merge(base, sections)).with_dtypes("cuda")


def least(role: str, **sections: Any) -> Memory:
    return least_on_gpu(job_of(**sections), role, SHAPES)


def test_scoring_roles_need_weights_in_their_dtype_and_one_row() -> None:
    """One row of activations."""
    norms = 90_000_000 - 80_000_000 - 9_000 * 1024
    assert least("reference") == Memory(weights=2 * POLICY + 2 * norms, activations=PASS)
    assert least("reward") == Memory(weights=2 * SCORER + 2 * (norms + 1025), activations=PASS)
    whole = least("reference", reference={"model": {"dtype": "float32"}})
    assert whole == Memory(weights=4 * POLICY, activations=WIDTH * (3 * 1024 * 4 + 3 * 2048 * 4))


def test_roles_that_train_need_what_the_blocks_store_for_one_row() -> None:
    state = Memory(4 * POLICY, 4 * POLICY, 8 * POLICY)
    assert least("actor") == replace(state, activations=INPUTS + CASTS)
    assert least("critic") == Memory(4 * SCORER, 4 * SCORER, 8 * SCORER, INPUTS + CASTS)
    whole = {"model": {"enable_gradient_checkpointing": False}}
    assert least("actor", actor=whole) == replace(state, activations=8 * BLOCK + CASTS)
    offloaded = {"model": {"enable_activation_offload": True, "dtype": "float32"}}
    block = WIDTH * (2 * 1024 * 3 * 4 + 4 * 1024 * 4 + 4 * 2048 * 4)  # recomputed, in float32
    assert least("actor", actor=offloaded) == replace(state, activations=block)


def test_whatever_is_gone_at_the_peak_does_not_count() -> None:
    state = Memory(4 * POLICY, 4 * POLICY, 8 * POLICY)
    # One pass a mini-batch: at its end there are no gradients yet, in the step no activations any more.
    assert least("actor", actor={"ppo_micro_batch_size_per_gpu": 32}) == state
    # Offloaded moments are there in the step alone.
    assert least("actor", actor={"fsdp_config": {"optimizer_offload": True}}) == state
    adapter = least("actor", actor={"model": {"lora_rank": 1, "target_modules": ["lm_head"]}})
    assert adapter == Memory(weights=4 * POLICY, activations=INPUTS + BLOCK)  # no module here has an adapter
    only_validates = {"trainer": {"val_only": True}}
    assert [least(role, **only_validates) for role in ("actor", "critic", "reference")] == [
        Memory(weights=4 * POLICY),
        Memory(weights=4 * SCORER),
        Memory(weights=least("reference").weights),
    ]


def test_engines_need_a_cache_for_one_row() -> None:
    assert least("rollout") == Memory(weights=4 * POLICY, kv_cache=CACHE)
    # vLLM reads up to 8,192 tokens at a time, and samples from 256 rows' logits.
    activations = 8192 * (3 * 1024 * 4 + 3 * 2048 * 2) + 256 * 9_000 * 4 * 2
    vllm = {"name": "vllm"}
    assert least("rollout", rollout=vllm) == Memory(2 * POLICY, 0, 0, activations, CACHE)
    halves = least("rollout", rollout=vllm | {"tensor_model_parallel_size": 2})
    assert halves == Memory(POLICY, 0, 0, activations // 2, CACHE // 2)


def refuse(job: JobConfig, memory_bytes: int, *roles: str, gpus: str = "3") -> None:
    given, each = {"all-0": list(gpus)}, dict.fromkeys(gpus, memory_bytes)
    refuse_what_gpus_cannot_hold(job, SHAPES, {"all-0": roles}, given, each)


def test_the_largest_role_of_a_shared_gpu_sets_its_least_memory() -> None:
    """Roles of one GPU take turns, and one byte less is refused."""
    enough = 16 * POLICY + INPUTS + CASTS
    refuse(job_of(), enough, *ROLES)
    words = "the actor takes at least .* but the memory of GPU 3 is .* its optimizer, .* actor.model.path, or"
    with pytest.raises(InvalidConfig, match=words):
        refuse(job_of(), enough - 1, *ROLES)
    long = job_of(data={"max_response_length": 99_600})  # its rows are larger than all else
    with pytest.raises(InvalidConfig, match=r"its activations, .* shorter rows than 100000 tokens"):
        refuse(long, 5 * GIB, *ROLES)


def test_vllm_must_find_room_in_its_share() -> None:
    needed = least("rollout", rollout={"name": "vllm"}).total

    def share(of: float) -> JobConfig:
        return job_of(rollout={"name": "vllm", "gpu_memory_utilization": of})

    refuse(share(0.5), 2 * needed, "rollout")
    words = "but rollout.gpu_memory_utilization 0.25 of the memory of GPU 3 .* to at least 0.5, or a smaller"
    with pytest.raises(InvalidConfig, match=words):
        refuse(share(0.25), 2 * needed, "rollout")
    with pytest.raises(InvalidConfig, match=r"Use a smaller model in actor\.model\.path"):
        refuse(share(1), needed - 1, "rollout")
    refuse(share(0.5), 20 * needed, *ROLES)  # it sleeps while the others compute
    refuse(
        share(0.5), 2 * needed, *ROLES, gpus="35"
    )  # ranks, each with an engine and a part of the other models
    with pytest.raises(InvalidConfig, match="GPU 3"):
        refuse(share(0.25), 2 * needed, *ROLES, gpus="35")
