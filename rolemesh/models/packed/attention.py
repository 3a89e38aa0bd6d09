"""Attention over rows that are laid end to end, and the attention of padded rows.

In float16 and bfloat16 on CUDA a kernel for uneven lengths needs no padding at all. Otherwise rows are padded
within attention, as `layout` says. Either way attention is over whole rows: keys and values of a shared prefix
are copied to each of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa

from rolemesh.config.model import AMPERE
from rolemesh.errors import InvalidConfig
from rolemesh.models.packed.layout import Places, Segments

PACKED = "rolemesh_packed"  # the name of packed_attention among transformers' attention functions
KERNEL_TYPES = (torch.float16, torch.bfloat16)  # supported by varlen_attn
# of varlen_attn: its heads are multiples of the step, up to the maximum
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
# Heads may share keys and values. torch 2.11 has no such argument; there the kernel shares them unasked.
KERNEL_OPTIONS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


class NoKernel(InvalidConfig):
    """The kernel for uneven lengths cannot compute this attention; in float32 or with padding others can."""


class Take(torch.autograd.Function):
    """Computes x[index] along the first axis; its gradient uses indices too, faster than a scatter-add.

    The gradient is the result's gradient at `back`, with 0 at `none`. The result's gradient at `again` is added
    at `repeated`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, back: Tensor, none: Tensor | None, again: Tensor, repeated: Tensor
    ) -> Tensor:
        ctx.back = back
        ctx.none = none
        ctx.again = again
        ctx.repeated = repeated
        return x.contiguous().index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.contiguous()
        taken = gradient.index_select(0, ctx.back)
        if ctx.none is not None:
            taken.index_fill_(0, ctx.none, 0)
        if len(ctx.again):
            wide = torch.promote_types(taken.dtype, torch.float32)
            again = gradient.index_select(0, ctx.again).to(wide)
            taken = taken.to(wide).index_add_(0, ctx.repeated, again).to(gradient.dtype)
        return taken, None, None, None, None, None


taken: Callable[..., Tensor] = Take.apply


def to_places(x: Tensor, places: Places) -> Tensor:
    """Map tokens [N, ...] to places [places, ...]. No gradient may flow to the padding after a row's end."""
    return taken(x, places.tokens, places.first, None, places.again, places.repeated)


def to_tokens(x: Tensor, places: Places) -> Tensor:
    """Map places [places, ...] to tokens [N, ...]."""
    nowhere = places.again[:0]
    return taken(x, places.first, places.tokens, places.others, nowhere, nowhere)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each row, with the signature that transformers calls.

    Args:
        query, key, value: [1, heads, N, width]; keys and values may have fewer heads.
        segments: from `pack`.
        sliding_window: number of tokens that a token attends to, itself included; None: all before it.

    Returns:
        [1, N, heads, width].

    Raises:
        InvalidConfig: the architecture needs something else, e.g. a soft cap or attention that is not causal.
        NoKernel: see check_heads_fit.
    """
    strange = softcap is not None or s_aux is not None or position_bias is not None
    if segments is None or strange or not getattr(module, "is_causal", True):
        raise InvalidConfig("its attention is not plain causal attention")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if segments.ulysses is not None:
        q, k, v = (segments.ulysses.to_heads(x)[: segments.num_tokens] for x in (q, k, v))
        output = attention_by_row(q, k, v, segments, scaling, sliding_window)
        return segments.ulysses.to_tokens(output)[None], None
    return attention_by_row(q, k, v, segments, scaling, sliding_window)[None], None


def attention_by_row(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Compute causal attention within each row over tokens [N, heads, width]; see packed_attention."""
    if q.is_cuda and torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    if segments.rows and q.dtype in KERNEL_TYPES:
        bounds = segments.bounds
        longest = segments.longest
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        check_heads_fit(q.shape[-1], v.shape[-1])
        q, k, v = (to_places(x, segments.rows) for x in (q, k, v))
        output = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, **KERNEL_OPTIONS
        )
        assert isinstance(output, Tensor)
        return to_tokens(output, segments.rows)
    sizes = [rows * width for rows, width in segments.buckets]
    # split, not slices: the gradient of a slice is as large as the tensor that it was cut from
    cells = [torch.split(to_places(x, segments.cells), sizes) for x in (q, k, v)]
    outputs = []
    for (rows, width), *parts in zip(segments.buckets, *cells, strict=True):
        query, *shared = (x.view(rows, width, *x.shape[1:]).transpose(1, 2) for x in parts)
        key, value = for_each_head(query, *shared)
        seen = None
        if sliding_window is not None and sliding_window < width:
            seen = torch.ones(width, width, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        # Causal: only padding attends to the padding after a row's end.
        part = F.scaled_dot_product_attention(
            query, key, value,
            attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        outputs.append(part.transpose(1, 2).flatten(0, 1))
    return to_tokens(torch.cat(outputs) if len(outputs) > 1 else outputs[0], segments.cells)


def check_heads_fit(head_dim: int, value_dim: int) -> None:
    """Check that the kernel for uneven lengths has heads of these widths.

    Args:
        head_dim: width of a head of queries and keys.
        value_dim: width of a head of values.

    Raises:
        NoKernel: it has not.
    """
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_STEP:
        raise NoKernel(
            f"the model has attention heads of width {head_dim}, and the kernel for uneven lengths takes "
            f"multiples of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
        )
    if head_dim != value_dim:
        raise NoKernel(
            f"the model has keys of width {head_dim} and values of width {value_dim}, and the kernel for "
            "uneven lengths takes equal widths"
        )


def check_capability(capability: tuple[int, int]) -> None:
    """Check that a GPU has the kernel for uneven lengths.

    Args:
        capability: its compute capability.

    Raises:
        NoKernel: it is older than Ampere.
    """
    if capability < AMPERE:
        version, needed = (".".join(map(str, parts)) for parts in (capability, AMPERE))
        raise NoKernel(
            f"this GPU has compute capability {version}, and the kernel for uneven lengths needs {needed} "
            "(Ampere) or newer"
        )


def for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values that heads share, where SDPA would keep all scores otherwise.

    Of its fused kernels on CUDA, the one for float32 and for masks knows no shared heads; a CPU's does.

    Args:
        query: [b, heads, n, head_dim].
        key, value: [b, fewer heads or as many, n, head_dim].
    """
    groups = query.shape[1] // key.shape[1]
    if not query.is_cuda or groups == 1:
        return key, value
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def padded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute transformers' attention sdpa, in float32 on CUDA by a fused kernel too.

    With a mask it repeats shared keys and values itself. Without one (no row has padding) SDPA shares them.

    Raises:
        InvalidConfig: the architecture needs something that SDPA does not have, and that it would ignore.
    """
    if options.get("softcap") is not None or options.get("s_aux") is not None:
        raise InvalidConfig(f"{type(module).__name__} has a soft cap or sinks, which attention sdpa does not")
    is_float32 = query.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    if is_float32 and use_gqa_in_sdpa(attention_mask, key, value):
        key, value = for_each_head(query, key, value)
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register("sdpa", padded_attention)


def is_packed(body: Any) -> bool:
    """Return whether remove_padding was called on the model."""
    config = getattr(body, "config", None)
    return config is not None and config._attn_implementation == PACKED
