"""The memory by model size of docs/gpu.md, as the planner computes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned import H100, ppo

from rolemesh.planner.device_specs import GIB
from rolemesh.planner.memory import kv_bytes_per_token, role_memory
from rolemesh.planner.shapes import ModelShape

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def qwen(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, *, tied: bool
) -> ModelShape:
    """The shape of a Qwen2.5 (arXiv:2412.15115), whose queries, keys and values have biases."""
    head_dim = hidden // heads
    shared = kv_heads * head_dim
    matrices = layers * (2 * hidden**2 + 2 * hidden * shared + 3 * hidden * intermediate)
    vectors = layers * (hidden + 2 * shared + 2 * hidden) + hidden
    return ModelShape(
        body_parameters=matrices + vectors + vocabulary * hidden,
        head_parameters=0 if tied else vocabulary * hidden,
        multiplied_parameters=matrices,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        stored="bfloat16",
    )


SHAPES = {
    "0.5B": qwen(896, 24, 14, 2, 4864, 151936, tied=True),
    "1.5B": qwen(1536, 28, 12, 2, 8960, 151936, tied=True),
    "3B": qwen(2048, 36, 16, 2, 11008, 151936, tied=True),
    "7B": qwen(3584, 28, 28, 4, 18944, 152064, tied=False),
    "14B": qwen(5120, 48, 40, 8, 13824, 152064, tied=False),
    "32B": qwen(5120, 64, 40, 8, 27648, 152064, tied=False),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_documentation_has_the_planners_memory_by_model_size(name: str) -> None:
    shape, job = SHAPES[name], ppo(rollout={"name": "vllm"})
    actor, reference, rollout = (
        role_memory(job, role, {role: shape}, H100) for role in ("actor", "reference", "rollout")
    )
    held = (actor.weights + actor.gradients + actor.optimizer, reference.weights, rollout.weights)
    cells = [name, *(f"{num_bytes / GIB:.1f} GiB" for num_bytes in held)]
    cells.append(f"{1000 * kv_bytes_per_token(shape, 'bfloat16') / 2**20:.0f} MiB")
    assert f"\n| {' | '.join(cells)} |\n" in PAGE.read_text(encoding="utf-8")


def test_two_models_have_as_many_parameters_as_published() -> None:
    """The smallest model and a larger one."""
    assert SHAPES["0.5B"].policy_parameters == 494_032_768
    assert SHAPES["7B"].policy_parameters == 7_615_616_512
