"""Forward passes without padding: rows are laid end to end, and each token attends to its own row alone.

On a CPU rows of like lengths are given to one attention kernel together, padded to a width which depends on
the row's own length alone; so a row's bits do not depend on its neighbours. On CUDA, where the type allows, a
kernel for uneven lengths needs no padding at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rolemesh.errors import InvalidConfig

PACKED = "rolemesh_packed"  # the name of packed_attention among transformers' attention functions
KERNEL_TYPES = (torch.float16, torch.bfloat16)  # of varlen_attn
SMALLEST_WIDTH = 16  # widths up to 64 are its multiples, then four for each doubling


@dataclass(frozen=True)
class Segments:
    """Rows laid end to end.

    Args:
        bounds: [rows + 1] int32, where each row begins, and the end of the last.
        longest: tokens.
        buckets: (rows, width) of each group of rows that attention takes together.
        cells: [N] the token's place among all cells of the buckets.
        tokens: [cells] the token in a cell; behind a row's end its last one again.
        ends: the cells behind a row's end.
    """

    bounds: Tensor
    longest: int
    buckets: tuple[tuple[int, int], ...]
    cells: Tensor
    tokens: Tensor
    ends: Tensor

    @classmethod
    def of(cls, lengths: Tensor) -> Segments:
        """Of rows with so many tokens each: [rows], at least 1."""
        known = lengths.cpu().numpy()
        width = np.array([padded_width(int(length)) for length in known])
        order = width.argsort(kind="stable")
        widths = width[order]
        row = order.repeat(widths)  # of a cell
        offset = np.arange(len(row)) - (widths.cumsum() - widths).repeat(widths)
        bounds, inside = np.concatenate([[0], known.cumsum()]), offset < known[row]
        tokens = bounds[row] + np.minimum(offset, known[row] - 1)
        cells = np.empty_like(tokens, shape=bounds[-1])
        cells[tokens[inside]] = inside.nonzero()[0]
        rows = zip(*np.unique(width, return_counts=True), strict=True)
        return cls(
            torch.from_numpy(bounds.astype(np.int32)).to(lengths.device),
            int(known.max()),
            tuple((int(count), int(width)) for width, count in rows),
            *(torch.from_numpy(x).to(lengths.device) for x in (cells, tokens, (~inside).nonzero()[0])),
        )


def padded_width(length: int) -> int:
    """Up to a quarter more than the length, and few different ones."""
    step = max(SMALLEST_WIDTH, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


class Take(torch.autograd.Function):
    """x[index] along the first axis. The gradient of x is that of the result at `back`, 0 at `none`: a copy,
    where an index alone would have it added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, none: Tensor | None) -> Tensor:
        ctx.back, ctx.none = back, none
        return x.contiguous().index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        taken = gradient.contiguous().index_select(0, ctx.back)
        return taken if ctx.none is None else taken.index_fill_(0, ctx.none, 0), None, None, None


def to_cells(x: Tensor, segments: Segments) -> Tensor:
    """[N, ...] to [cells, ...]. What follows must let no gradient flow to a cell behind a row's end."""
    cells: Tensor = Take.apply(x, segments.tokens, segments.cells, None)  # type: ignore[no-untyped-call]
    return cells


def to_tokens(x: Tensor, segments: Segments) -> Tensor:
    """[cells, ...] to [N, ...]."""
    tokens: Tensor = Take.apply(x, segments.cells, segments.tokens, segments.ends)  # type: ignore[no-untyped-call]
    return tokens


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
    """Causal attention within each row, as transformers calls it.

    Args:
        query, key, value: [1, heads, N, width]; keys and values may have fewer heads.
        sliding_window: how many tokens back a token sees, itself included.

    Returns:
        [1, N, heads, width].

    Raises:
        InvalidConfig: an architecture asks for what is not done here.
    """
    strange = softcap is not None or s_aux is not None or position_bias is not None
    if segments is None or strange or not getattr(module, "is_causal", True):
        raise InvalidConfig("its attention is not the usual one")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if q.is_cuda and torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    if q.is_cuda and q.dtype in KERNEL_TYPES:
        bounds, longest = segments.bounds, segments.longest
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        output = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, enable_gqa=True
        )
        assert isinstance(output, Tensor)
        return output[None], None
    sizes = [rows * width for rows, width in segments.buckets]
    # split and not slices: the gradient of a slice is as large as what it was cut from
    cells = [torch.split(to_cells(x, segments), sizes) for x in (q, k, v)]
    outputs = []
    for (rows, width), *parts in zip(segments.buckets, *cells, strict=True):
        padded = [x.view(rows, width, *x.shape[1:]).transpose(1, 2) for x in parts]
        seen = None
        if sliding_window is not None and sliding_window < width:
            seen = torch.ones(width, width, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        # Causal: what stands behind a row's end is seen by what stands there alone.
        part = F.scaled_dot_product_attention(
            padded[0], padded[1], padded[2],
            attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=True,
        )  # fmt: skip
        outputs.append(part.transpose(1, 2).flatten(0, 1))
    return to_tokens(torch.cat(outputs) if len(outputs) > 1 else outputs[0], segments)[None], None


AttentionInterface.register(PACKED, packed_attention)


def remove_padding(body: Any, role: str) -> None:
    """From now on the model attends within the rows of a pass without padding.

    Whether it can is tried: two short rows end to end must give what each gives alone. That tells apart every
    architecture whose tokens meet elsewhere than in transformers' attention interface.

    Args:
        body: a transformers model without its head.
        role: for the message.

    Raises:
        InvalidConfig: its numbers come out otherwise; use_remove_padding says so.
    """
    device = next(body.parameters()).device
    rows = [torch.arange(length, device=device)[None] for length in (7, 4)]
    ids = torch.cat(rows, 1)
    segments = Segments.of(torch.tensor([row.shape[1] for row in rows], device=device))
    with torch.no_grad():
        alone = [body(input_ids=row, position_ids=row, use_cache=False).last_hidden_state for row in rows]
        try:
            body.set_attn_implementation(PACKED)
            together = body(input_ids=ids, position_ids=ids, use_cache=False, segments=segments)
            if not torch.allclose(together.last_hidden_state, torch.cat(alone, 1), rtol=1e-3, atol=1e-4):
                raise InvalidConfig("rows that lie end to end change each other's numbers")
        except (InvalidConfig, RuntimeError, TypeError, ValueError) as error:
            raise InvalidConfig(
                f"{role}.model.use_remove_padding is true, and {type(body).__name__} cannot go without padding "
                f"({error}); set it to false"
            ) from error


def is_packed(body: Any) -> bool:
    """Whether remove_padding was called on it."""
    config = getattr(body, "config", None)
    return config is not None and config._attn_implementation == PACKED
