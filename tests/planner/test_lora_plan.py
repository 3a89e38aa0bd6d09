"""What the planner says of an actor that trains an adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolemesh.checks.device_memory import least_memory
from rolemesh.config import JobConfig
from rolemesh.config.job import make_job
from rolemesh.config.model import PolicyModelConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_causal_lm
from rolemesh.models.lora import Adapter
from rolemesh.planner.cost import role_seconds
from rolemesh.planner.device_specs import GPUS
from rolemesh.planner.memory import role_memory, role_shapes
from rolemesh.planner.shapes import read_shape

H100 = GPUS["h100"]


def job_of(model: Path, **keys: Any) -> JobConfig:
    return make_job({"algorithm": {"use_kl_in_reward": True}, "actor": {"model": {"path": str(model), **keys}}})


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), r".*layers\.1\..*proj"])
def test_the_planner_counts_the_adapters_parameters(any_model: Path, targets: Any) -> None:
    config = PolicyModelConfig(path=str(any_model), lora_rank=3, target_modules=targets)
    adapter = Adapter(load_causal_lm(config, "actor"), config, seed=0)
    counted = read_shape(config, "actor").trained_parameters(config)
    assert counted == sum(tensor.numel() for tensor in adapter.weights.values())


@pytest.mark.parametrize("targets", [["nope"], ["q_proj", "nope"], "q_proj"])
def test_a_target_that_the_model_lacks_is_refused_before_start(two_layers: Path, targets: Any) -> None:
    job = job_of(two_layers, lora_rank=8, target_modules=targets)
    with pytest.raises(
        InvalidConfig, match=r"target_modules: .* matches no module; expected some of \[.*'q_proj'"
    ):
        role_memory(job, "actor", role_shapes(job), H100)


def test_gradients_and_moments_are_the_adapters_alone(two_layers: Path) -> None:
    # Two layers of width 64, two of four heads for keys and values, an MLP of 256: rows plus columns are
    # q, o: 128; k, v: 96; gate, up, down: 320.
    adapter = 8 * 2 * (2 * 128 + 2 * 96 + 3 * 320)
    job, whole = job_of(two_layers, lora_rank=8), job_of(two_layers)
    shapes = role_shapes(job)
    assert shapes.keys() == {"actor", "rollout", "critic"}  # no reference
    assert role_shapes(whole).keys() == {"actor", "rollout", "critic", "reference"}
    base = shapes["actor"].policy_parameters
    memory, of_all = role_memory(job, "actor", shapes, H100), role_memory(whole, "actor", shapes, H100)
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        4 * (base + adapter),
        4 * adapter,
        8 * adapter,
    )
    assert (of_all.weights, of_all.gradients, of_all.optimizer) == (4 * base, 4 * base, 8 * base)
    least = least_memory(job, "actor", shapes)
    assert least.parts() | {"activations": 0} == memory.parts() | {"activations": 0}
    half = job_of(two_layers, lora_rank=8, dtype="bfloat16", enable_gradient_checkpointing=False)
    stored = {"actor": replace(shapes["actor"], stored="bfloat16")}
    held, cast = (role_memory(half, "actor", each, H100) for each in (stored, shapes))
    assert cast.weights == memory.weights
    # All but five norms of 64 numbers and the biases of q, k and v, which are counted as those are.
    vectors = 5 * 64 + 2 * (64 + 2 * 32)
    assert held.weights == 2 * base + 2 * vectors + 4 * adapter
    table = 64 * shapes["actor"].vocabulary  # the head's, though it is tied
    assert cast.activations - held.activations == 2 * (shapes["actor"].multiplied_parameters + table)
    least = least_memory(half, "actor", stored)
    assert least.parts() | {"activations": 0} == held.parts() | {"activations": 0}


def test_a_reference_in_the_actor_takes_as_long_as_an_actor_pass(two_layers: Path) -> None:
    job, shapes = job_of(two_layers, lora_rank=8), role_shapes(job_of(two_layers))
    with_kl = role_seconds(job, "actor", shapes, H100)
    without = role_seconds(make_job({"actor": {"model": {"lora_rank": 8}}}), "actor", shapes, H100)
    assert with_kl["score"] == pytest.approx(2 * without["score"])
    assert with_kl["update"] < role_seconds(job_of(two_layers), "actor", shapes, H100)["update"]
