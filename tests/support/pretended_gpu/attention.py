"""The attention kernels of a GPU, computed on the CPU: which one runs, what it demands, and its gradients.

Numbers are computed in float32 and rounded once, as in the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD = 256  # of the flash kernel


def kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shares_heads: bool) -> str:
    """Return the kernel that scaled_dot_product_attention takes on CUDA: flash, efficient or math.

    The rules are those of torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (use_flash_attention,
    use_mem_efficient_attention). cuDNN, which some versions prefer to flash, counts as flash.

    Args:
        query, key, value: [b, heads, n, width].
        mask: broadcasts to [b, heads, n, n]; None: none.
        shares_heads: enable_gqa, with fewer heads of keys and values.
    """
    if any(x.stride(-1) != 1 for x in (query, key, value)):
        return "math"
    widths = {query.shape[-1], key.shape[-1], value.shape[-1]}
    if mask is None and query.dtype in HALF and len(widths) == 1 and query.shape[-1] <= WIDEST_HEAD:
        return "flash"
    step = 4 if query.dtype == torch.float32 else 8  # in elements: 16 bytes
    if (
        not shares_heads
        and query.dtype in (*HALF, torch.float32)
        and all(width % step == 0 for width in widths)
    ):
        return "efficient"
    return "math"


def probabilities(query: Tensor, key: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return [..., heads, n, n] float32: 0 for a token that may attend to none, as in all kernels."""
    return ((query @ key.transpose(-1, -2)) * scale + bias).softmax(-1).nan_to_num()


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Compute attention over [..., heads, n, width]; keys and values may have fewer heads.

    Args:
        bias: broadcasts to [..., heads, n, n]; -inf where a token is not attended to.
    """
    q, k, v = _wide(query, key, value)
    return (probabilities(q, k, bias, scale) @ v).to(query.dtype)


def gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of `attended` for query, key and value, from that of its result."""
    q, k, v = _wide(query, key, value)
    g, p = gradient.float(), probabilities(q, k, bias, scale)
    by_p = g @ v.transpose(-1, -2)
    by_scores = p * (by_p - (by_p * p).sum(-1, keepdim=True)) * scale
    by_key, by_value = by_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g
    found = (by_scores @ k, *(_of_shared(x, like) for x, like in ((by_key, key), (by_value, value))))
    return tuple(x.to(query.dtype) for x in found)


def _wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = query.shape[-3] // key.shape[-3]
    return query.float(), *(x.float().repeat_interleave(groups, -3) for x in (key, value))


def _of_shared(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient [..., heads, n, width] over the heads that share keys or values."""
    return gradient.unflatten(-3, (like.shape[-3], -1)).sum(-3)


def bias_of(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """Return what is added to the scores [..., heads, n, m], from the arguments of SDPA."""
    seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if mask is None or mask.dtype == torch.bool:
        seen = seen if mask is None else seen & mask
        return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    return mask.float().masked_fill(~seen, -math.inf)


def scale_of(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


class Fused(torch.autograd.Function):
    """SDPA by a fused kernel: one launch forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, launch: Any, bias: Tensor, scale: float
    ) -> Any:
        ctx.save_for_backward(query, key, value)
        ctx.launch, ctx.bias, ctx.scale = launch, bias, scale
        return launch("forward", lambda *given: attended(*given, bias, scale), query, key, value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = ctx.launch(
            "backward", lambda *given: gradients(*given, ctx.bias, ctx.scale), gradient, *ctx.saved_tensors
        )
        return *found, None, None, None


# ------------------------------------------------------------------------------- rows of uneven lengths


def check_varlen(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int) -> None:
    """Check what the kernel demands of [tokens, heads, width] (flash_api.cpp: mha_varlen_fwd).

    Raises:
        RuntimeError: it would be refused, or read beyond its arguments.
    """
    width, lengths = query.shape[-1], bounds.diff()
    demands = {
        "float16 or bfloat16, of all three": query.dtype in HALF and key.dtype == value.dtype == query.dtype,
        f"heads of a multiple of 8 up to {WIDEST_HEAD}": width % 8 == 0 and width <= WIDEST_HEAD,
        "neighbouring elements": all(x.stride(-1) == 1 for x in (query, key, value)),
        "heads that divide": query.shape[1] % key.shape[1] == 0,
        "int32 bounds": bounds.dtype == torch.int32,
        "bounds from 0 to the number of tokens": bounds[0] == 0 and bounds[-1] == len(query) == len(key),
        "ascending bounds": bool((lengths >= 0).all()),
        "the longest row": int(lengths.max()) == longest,
    }
    if missing := [demand for demand, holds in demands.items() if not holds]:
        raise RuntimeError(f"varlen_attn needs {', '.join(missing)}")


def _rows(x: Tensor) -> Tensor:
    return x.transpose(0, 1)  # [heads, tokens, width]


def _bias_of_rows(bounds: Tensor, num_tokens: int, window: tuple[int, int] | list[int]) -> Tensor:
    at = torch.arange(num_tokens)
    row = torch.bucketize(at, bounds[1:].long(), right=True)
    before = at[:, None] - at
    seen = (
        (row[:, None] == row)
        & ((window[1] < 0) | (before >= -window[1]))
        & ((window[0] < 0) | (before <= window[0]))
    )
    return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)


def varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, bounds_of_keys: Tensor, longest: int,
    longest_of_keys: int, is_causal: bool = False, scale: float | None = None, window_size: Any = None,
    enable_gqa: bool = False, *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute torch_attn::_varlen_attn, on the CPU."""
    check_varlen(query, key, value, bounds, longest)
    bias = _bias_of_rows(bounds, len(query), window_size or (-1, -1))
    output = (
        attended(*map(_rows, (query, key, value)), bias, scale_of(query, scale)).transpose(0, 1).contiguous()
    )
    return output, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def varlen_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, _: Tensor, bounds: Tensor,
    bounds_of_keys: Tensor, longest: int, longest_of_keys: int, is_causal: bool, random: Tensor,
    scale: float | None = None, window_size: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute torch_attn::_varlen_attn_backward, on the CPU."""
    bias = _bias_of_rows(bounds, len(query), window_size or (-1, -1))
    found = gradients(*map(_rows, (gradient, query, key, value)), bias, scale_of(query, scale))
    return tuple(x.transpose(0, 1).contiguous() for x in found)


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::mm.dtype": lambda one, other, dtype: one.to(dtype) @ other.to(dtype),
    "torch_attn::_varlen_attn": varlen,
    "torch_attn::_varlen_attn_backward": varlen_backward,
}
