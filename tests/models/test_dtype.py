"""In which type a model computes: `auto`, and attention in float32 on a GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rolemesh.config.job import make_job
from rolemesh.config.job_sections import DTYPE_KEYS
from rolemesh.config.model import FrozenModelConfig, chosen_dtype
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_causal_lm, with_dtype
from rolemesh.models.packed.attention import packed_attention, padded_attention
from rolemesh.models.packed.layout import pack
from rolemesh.services.rollout.engines.hf.cached_attention import Reading

HEADS, SHARED, WIDTH = 6, 2, 8


@pytest.mark.parametrize(
    ("device", "capability", "auto"),
    [
        ("cpu", (8, 0), "float32"),
        ("cuda", (7, 0), "float32"),  # V100
        ("cuda", (7, 5), "float32"),  # T4
        ("cuda", (8, 0), "bfloat16"),  # A100
        ("cuda", (9, 0), "bfloat16"),  # H100
        ("cuda", (12, 0), "bfloat16"),
    ],
)
def test_auto_is_bfloat16_where_a_gpu_multiplies_in_it(
    device: str, capability: tuple[int, int], auto: str
) -> None:
    assert chosen_dtype("auto", "rollout.dtype", device, capability) == auto
    for named in ("float32", "float16"):
        assert chosen_dtype(named, "rollout.dtype", device, capability) == named
    if device == "cpu" or auto == "bfloat16":
        assert chosen_dtype("bfloat16", "rollout.dtype", device, capability) == "bfloat16"


def test_bfloat16_on_a_gpu_without_it_names_what_to_set() -> None:
    message = r"actor\.model\.dtype is bfloat16, but this GPU has compute capability 7\.5.*float32, or to auto"
    with pytest.raises(InvalidConfig, match=message):
        chosen_dtype("bfloat16", "actor.model.dtype", "cuda", (7, 5))


def dtypes(job: Any) -> dict[str, str]:
    found = {}
    for key in DTYPE_KEYS:
        section = job
        for name in key.split("."):
            section = getattr(section, name)
        found[key] = section
    return found


def test_a_job_is_decided_for_a_device_and_what_it_names_stays() -> None:
    assert dtypes(make_job({})) == dict.fromkeys(DTYPE_KEYS, "auto")
    job = make_job({"critic": {"model": {"dtype": "float32"}}, "rollout": {"dtype": "float16"}})
    named = {"critic.model.dtype": "float32", "rollout.dtype": "float16"}
    for device, auto in (("cuda", "bfloat16"), ("cpu", "float32")):
        decided = job.with_dtypes(device)
        assert dtypes(decided) == dict.fromkeys(DTYPE_KEYS, auto) | named
        assert decided.with_dtypes("cpu") == decided


def test_a_role_on_a_cpu_uses_float32_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        found = with_dtype(FrozenModelConfig(path="m"), "reference", torch.device("cpu"))
    assert found == FrozenModelConfig(path="m", dtype="float32")
    assert caplog.messages == ["reference.model.dtype is auto: float32 on cpu"]


# ------------------------------------------------------------- attention in float32 on a GPU


class OnGpu(Tensor):
    """Says that it is on a GPU, and computes here. Notes the heads of keys and values that SDPA gets."""

    is_cuda = True
    noted: list[tuple[int, int]] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            cls.noted.append((args[1].shape[1], args[2].shape[1]))
        return super().__torch_function__(func, types, args, kwargs)


class Layer(nn.Module):
    is_causal = True
    num_key_value_groups = HEADS // SHARED


def attend(kind: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of two rows of 9 tokens [2, heads, 9, width] in each of the ways that models here take."""
    ones = torch.ones(2, 9, dtype=torch.int64)
    if kind == "hf":
        return Reading(ones.bool(), []).attend(0, query, key, value, None)
    if kind == "padded":
        return padded_attention(Layer(), query, key, value, None)[0]
    inputs, _ = pack(torch.arange(18).view(2, 9), ones, ones.cumsum(1) - 1)
    copies = inputs["input_ids"].shape[1] // 18
    laid = [x.transpose(0, 1).flatten(1, 2).repeat(1, copies, 1)[None] for x in (query, key, value)]
    window = 4 if kind == "packed with a window" else None
    output, _ = packed_attention(Layer(), *laid, None, segments=inputs["segments"], sliding_window=window)
    return output[0, :18].unflatten(0, (2, 9))


@pytest.mark.parametrize("kind", ["packed", "packed with a window", "padded", "hf"])
def test_float32_heads_on_a_gpu_have_their_own_keys_and_values(kind: str) -> None:
    """SDPA's fused kernel for float32 knows no shared heads; without it, all scores would be kept."""
    torch.manual_seed(0)
    shapes = [(2, heads, 9, WIDTH) for heads in (HEADS, SHARED, SHARED)]
    here = [torch.randn(shape, requires_grad=True) for shape in shapes]
    there = [x.detach().clone().as_subclass(OnGpu).requires_grad_() for x in here]
    expected = attend(kind, *here)
    OnGpu.noted.clear()
    found = attend(kind, *there)
    assert set(OnGpu.noted) == {(HEADS, HEADS)}
    assert_close(found.as_subclass(Tensor), expected)
    weight = torch.randn(expected.shape)
    gradients = [torch.autograd.grad((x * weight).sum(), of) for x, of in ((expected, here), (found, there))]
    for ours, theirs in zip(*gradients, strict=True):
        assert_close(theirs.as_subclass(Tensor), ours)


def test_transformers_takes_that_attention(two_layers: Path) -> None:
    model = load_causal_lm(FrozenModelConfig(path=str(two_layers)), "actor")
    assert ALL_ATTENTION_FUNCTIONS.get_interface(model.config._attn_implementation, None) is padded_attention
