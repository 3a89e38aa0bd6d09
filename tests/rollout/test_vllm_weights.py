"""An update of vLLM's weights is whole: every parameter has the version's bits, in the engine's dtype.

One process loads all models into vLLM's worker. There is no engine, no cache and no generation."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig
from vllm_rollouts import installed, make_plain_model
from vllm_worker import refusal, updated

pytestmark = [pytest.mark.timeout(900), installed]  # the process imports vLLM


@pytest.fixture(scope="module")
def apart() -> Iterator[ProcessPoolExecutor]:
    """A process in which all tests of this module run vLLM."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize(
    ("config_class", "is_tied", "dtype"),
    [
        (Qwen3Config, True, "bfloat16"),
        (Qwen3Config, False, "float32"),
        (LlamaConfig, True, "float32"),
        (LlamaConfig, False, "bfloat16"),
        (Qwen3MoeConfig, False, "bfloat16"),  # as on a GPU: vLLM on a CPU loads it, and then computes wrongly
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_after_each_of_ten_updates_every_weight_is_the_versions(
    config_class: Any, is_tied: bool, dtype: str, apart: ProcessPoolExecutor, tmp_path: Path
):
    model = make_plain_model(tmp_path, config_class, is_tied=is_tied)
    assert apart.submit(updated, model, dtype, 10).result() == [[]] * 10


def test_an_update_that_leaves_a_weight_as_it_was_is_an_error(apart: ProcessPoolExecutor, tmp_path: Path):
    """Also one of several that vLLM keeps in one parameter, and one of several parameters of a layer."""
    model = make_plain_model(tmp_path, Qwen3MoeConfig, is_tied=False)
    layer = "model.layers.0"
    lacking = [f"{layer}.self_attn.k_proj.weight", f"{layer}.mlp.experts.down_proj"]
    lacking += ["model.norm.weight", "lm_head.weight"]
    assert apart.submit(refusal, model, lacking).result() == (
        f"an update left weights of vLLM's layers unset: {layer}.self_attn.qkv_proj got 6144 of 8192 elements; "
        f"{layer}.mlp.experts.routed_experts got 16384 of 24576 elements; model.norm got 0 of 64 elements "
        "and 1 more"
    )
