"""What is tried when a role loads: where it computes, as it computes, and what it says if it fails."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoModelForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rolemesh.config.job import make_job
from rolemesh.config.model import ModelConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.packed.attention import (
    PACKED,
    NoKernel,
    check_capability,
    check_heads_fit,
    packed_attention,
)
from rolemesh.models.packed.layout import pack
from rolemesh.models.packed.load_probe import remove_padding
from rolemesh.models.reward_model import RewardModel
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.services.critic.worker import CriticWorker

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
DTYPES = ["float32", "bfloat16", "float16"]
Inputs = dict[str, Any]


def body_of(kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval().get_decoder()


def with_fault(body: Any, fault: Callable[[Inputs], None]) -> Any:
    """Let something happen to the inputs of each pass, or instead of it."""

    def before(module: nn.Module, args: tuple[()], inputs: Inputs) -> tuple[tuple[()], Inputs]:
        fault(inputs)
        return args, inputs

    body.register_forward_pre_hook(before, with_kwargs=True)
    return body


@pytest.mark.parametrize("dtype", DTYPES)
def test_models_that_run_without_padding_pass_in_every_dtype(dtype: str) -> None:
    for kind, settings in (
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Mistral", {"sliding_window": 5}),
        ("Llama", {"num_hidden_layers": 24, "initializer_range": 0.02}),
    ):
        remove_padding(body_of(kind, **settings), "actor", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("Gemma2", {"head_dim": 8, "attn_implementation": "eager"}), ("Bloom", {}), ("Mamba", {})],
    ids=["soft cap", "no attention interface", "no attention"],
)
def test_models_that_cannot_run_without_padding_are_refused(
    kind: str, settings: dict[str, Any], dtype: str
) -> None:
    message = r"actor\.model\.use_remove_padding is true, but .* cannot run without padding .*; set it to false"
    with pytest.raises(InvalidConfig, match=message):
        remove_padding(body_of(kind, **settings), "actor", dtype)


def drop_positions(inputs: Inputs) -> None:
    inputs["position_ids"] = None


def forget_rows(inputs: Inputs) -> None:
    """Let tokens attend to all before them, also to those of other rows."""
    if "segments" in inputs:
        ids = inputs["input_ids"]
        one_row, _ = pack(ids, torch.ones_like(ids), torch.arange(ids.numel())[None])
        inputs["segments"] = one_row["segments"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [drop_positions, forget_rows])
@pytest.mark.parametrize("deviation", [0.2, 0.02])
def test_a_model_that_ignores_positions_or_rows_is_refused(
    fault: Callable[[Inputs], None], deviation: float, dtype: str
) -> None:
    """Also one with small weights: its attention is nearly uniform, so that positions hardly matter."""
    body = body_of("Qwen2", initializer_range=deviation)
    with pytest.raises(InvalidConfig, match="rows laid end to end change each other's numbers"):
        remove_padding(with_fault(body, fault), "actor", dtype)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: str(error)[:24],
)
def test_a_failure_of_the_machine_is_not_the_architectures(error: Exception) -> None:
    def fail(inputs: Inputs) -> None:
        if "segments" in inputs:
            raise error

    with pytest.raises(type(error), match=re.escape(str(error))) as failure:
        remove_padding(with_fault(body_of("Qwen2"), fail), "actor")
    assert failure.value is error


def test_numbers_that_are_not_finite_are_not_the_architectures() -> None:
    """In float16 the largest number is 65504."""
    body = body_of("Qwen2")
    body.layers[0].mlp.down_proj.weight.data.fill_(1e7)
    remove_padding(body, "reference", "bfloat16")
    body.set_attn_implementation("sdpa")
    with pytest.raises(InvalidConfig, match=r"not finite, with reference\.model\.dtype float16"):
        remove_padding(body, "reference", "float16")


# --------------------------------------------------------------------- what the kernel cannot do


def test_heads_that_the_kernel_lacks_are_refused_before_it_runs() -> None:
    for fits in (8, 64, 256):
        check_heads_fit(fits, fits)
    for head_dim, value_dim, message in (
        (264, 264, "heads of width 264"),
        (100, 100, "heads of width 100"),
        (192, 128, "keys of width 192 and values of width 128"),
    ):
        ones = torch.ones(1, 300, dtype=torch.int64)
        segments = pack(ones, ones, ones.cumsum(1) - 1)[0]["segments"]
        query = torch.zeros(1, 1, 300, head_dim, dtype=torch.bfloat16)
        value = torch.zeros(1, 1, 300, value_dim, dtype=torch.bfloat16)
        on_gpu = replace(segments, rows=segments.cells)  # there rows have places without padding
        with pytest.raises(NoKernel, match=message):
            packed_attention(nn.Module(), query, query, value, None, segments=on_gpu)


def test_gpus_before_ampere_have_no_such_kernel() -> None:
    for newer in ((8, 0), (8, 9), (9, 0), (12, 0)):
        check_capability(newer)
    with pytest.raises(NoKernel, match=r"compute capability 7\.5, .* needs 8\.0 \(Ampere\) or newer"):
        check_capability((7, 5))


def test_the_error_of_a_missing_kernel_says_both_ways_out() -> None:
    def fail(inputs: Inputs) -> None:
        if "segments" in inputs:
            check_heads_fit(320, 320)

    message = (
        r"critic\.model\.use_remove_padding is true and critic\.model\.dtype is bfloat16, but the model has "
        r"attention heads of width 320, .*; set critic\.model\.use_remove_padding to false, or "
        r"critic\.model\.dtype to float32"
    )
    with pytest.raises(InvalidConfig, match=message):
        remove_padding(with_fault(body_of("Qwen2"), fail), "critic", "bfloat16")


@pytest.mark.gpu
def test_the_widest_kernel_heads_run_and_wider_ones_in_float32() -> None:
    remove_padding(body_of("Qwen3", head_dim=256).cuda(), "actor", "bfloat16")
    remove_padding(body_of("Qwen3", head_dim=264).cuda(), "actor", "float32")
    with pytest.raises(InvalidConfig, match=r"heads of width 264, .* or actor\.model\.dtype to float32"):
        remove_padding(body_of("Qwen3", head_dim=264).cuda(), "actor", "bfloat16")


# ---------------------------------------------------------------------------------- roles


def test_each_role_is_tried_in_its_type(
    two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scoring = AutoModelForSequenceClassification.from_pretrained(two_layers, num_labels=1)
    scoring.save_pretrained(tmp_path / "scoring")
    types: list[torch.dtype] = []

    def note(*arguments: Any, **inputs: Any) -> Any:
        types.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
        return packed_attention(*arguments, **inputs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, PACKED, note)  # type: ignore[arg-type]
    model = {"dtype": "bfloat16"}
    job = make_job(
        {
            "data": {"train_batch_size": 8},
            "trainer": {"device": "cpu", "default_local_dir": "."},
            "actor": {"model": {"path": str(two_layers), **model}, "ppo_mini_batch_size": 8},
            "critic": {"model": model},
            "reference": {"model": model},
        }
    )
    trained, frozen = {torch.float32, torch.bfloat16}, {torch.bfloat16}  # the first have float32 weights
    for load, expected in (
        (lambda: ActorWorker(job).close(), trained),
        (lambda: ReferenceWorker(job).close(), frozen),
        (lambda: CriticWorker(job).close(), trained),
        (lambda: RewardModel.load(ModelConfig(path=str(tmp_path / "scoring"), **model)), frozen),
    ):
        types.clear()
        load()
        assert set(types) == expected
