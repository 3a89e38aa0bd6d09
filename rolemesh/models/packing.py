"""Forward passes without padding: rows are laid end to end, and each token attends only to its own row.

Rows with a common prefix (the prompt of a group's answers, a chat template) share it: its tokens are computed
once, because a token's numbers depend only on the tokens before it.

On a CPU, rows of similar lengths go to one attention kernel together, padded to a width that depends only on
the row's own length. So a row's bits do not depend on its neighbours. On CUDA, in float16 and bfloat16, a
kernel for uneven lengths needs no padding at all. Either way attention is over whole rows: keys and values of a
shared prefix are copied to each of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward, use_gqa_in_sdpa

from rolemesh.errors import InvalidConfig
from rolemesh.models.chunks import MIN_MATRIX_ROWS
from rolemesh.ranks.ulysses import Ulysses

PACKED = "rolemesh_packed"  # the name of packed_attention among transformers' attention functions
KERNEL_TYPES = (torch.float16, torch.bfloat16)  # supported by varlen_attn
# Heads may share keys and values. torch 2.11 has no such argument; there the kernel shares them unasked.
KERNEL_OPTIONS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)
SMALLEST_WIDTH = 16  # widths up to 128 are its multiples; beyond, there are four widths per doubling
# torch's CPU attention kernel sums over blocks of 512 columns, and MKL over up to 384 columns in one piece.
BLOCK, PIECE = 512, 384

Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pass lie row by row. A token of a shared prefix has a place in each of its rows.

    Args:
        tokens: [places], the token at each place; padding after a row's end repeats the row's last token.
        first: [N], one place for each token.
        others: all places except `first`.
        again: the places in `others` that hold a token, i.e. not padding.
        repeated: the tokens at `again`.
    """

    tokens: Tensor
    first: Tensor
    others: Tensor
    again: Tensor
    repeated: Tensor

    @classmethod
    def of(cls, table: Integers, new: Truths, lengths: Integers, widths: Integers, order: Integers) -> Places:
        """Lay out rows one after the other.

        Args:
            table: [rows, longest], the token at each position of a row; arbitrary after its end.
            new: [rows, longest], True where a token occurs for the first time (see tokens_of).
            lengths: [rows], number of tokens.
            widths: [rows], number of places, at least the length.
            order: the order in which the rows are laid out.
        """
        widths = widths[order]
        row = order.repeat(widths)
        offset = np.arange(len(row)) - (widths.cumsum() - widths).repeat(widths)
        inside, at = offset < lengths[row], np.minimum(offset, lengths[row] - 1)
        tokens, is_first = table[row, at], inside & new[row, at]
        first = np.empty(int(new.sum()), np.int64)
        first[tokens[is_first]] = is_first.nonzero()[0]
        again = (inside & ~is_first).nonzero()[0]
        arrays = (tokens, first, (~is_first).nonzero()[0], again, tokens[again])
        return cls(*map(torch.from_numpy, arrays))

    def to(self, device: torch.device) -> Places:
        fields = (self.tokens, self.first, self.others, self.again, self.repeated)
        return Places(*(tensor.to(device) for tensor in fields))


@dataclass(frozen=True)
class Segments:
    """The layout of rows laid end to end, for attention.

    Args:
        bounds: [rows + 1] int32, the start of each row in `rows`, and the end of the last.
        longest: tokens of the longest row.
        rows: row after row without padding, for CUDA's kernel for uneven lengths; None on a CPU.
        buckets: (number of rows, width) of each group of rows that attention processes together.
        cells: bucket after bucket, each row padded to its bucket's width.
        num_tokens: N, of all rows.
        ulysses: the ranks over which the tokens are spread; None: they are all here.
    """

    bounds: Tensor
    longest: int
    rows: Places | None
    buckets: tuple[tuple[int, int], ...]
    cells: Places
    num_tokens: int
    ulysses: Ulysses | None = None


def pack(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> tuple[dict[str, Any], Tensor]:
    """Prepare a forward pass over the tokens of rows; shared prefixes occur once.

    Args:
        input_ids, attention_mask, position_ids: [b, S]; a row may have no token, but at least one row has some.

    Returns:
        The model's inputs: input_ids and position_ids [1, N], and segments. And [b, S], the index of each
        cell's token among the N (arbitrary for padding).
    """
    device = input_ids.device
    ids, positions = (x.to("cpu", torch.int64).numpy().ravel() for x in (input_ids, position_ids))
    mask = attention_mask.bool().cpu().numpy()
    lengths = mask.sum(1)
    widths = np.array([padded_width(int(length)) for length in lengths])
    inside = np.arange(lengths.max()) < lengths[:, None]  # [b, longest]: rows are left-aligned here
    cell = np.zeros(inside.shape, np.int64)  # index into [b * S]
    cell[inside] = mask.ravel().nonzero()[0]
    kinds = kinds_of(widths) if device.type == "cpu" else np.zeros_like(widths)
    keys = np.where(inside, positions[cell] << 32 | ids[cell], -1)
    table, new = tokens_of(np.column_stack([kinds, keys]), inside)
    num_tokens = int(new.sum())
    cell_of = np.empty(num_tokens, np.int64)
    cell_of[table[new]] = cell[new]
    places = np.zeros(mask.size, np.int64)
    places[cell[inside]] = table[inside]

    # Of all rows, so that matrices have at least MIN_MATRIX_ROWS rows.
    copies = -(-MIN_MATRIX_ROWS // num_tokens)
    segments = segments_of(
        np.concatenate([table + copy * num_tokens for copy in range(copies)]),
        np.tile(new, (copies, 1)),
        np.tile(lengths, copies),
        np.tile(widths, copies),
        device,
    )
    fed = np.tile(cell_of, copies)
    laid = {"input_ids": ids[None, fed], "position_ids": positions[None, fed]}
    inputs = {name: torch.from_numpy(column).to(device) for name, column in laid.items()}
    return {**inputs, "segments": segments}, torch.from_numpy(places).view(mask.shape).to(device)


def segments_of(
    table: Integers, new: Truths, lengths: Integers, widths: Integers, device: torch.device
) -> Segments:
    """Make the Segments of rows; for the arguments see Places.of."""
    of_width, num_rows = (array.tolist() for array in np.unique(widths[widths > 0], return_counts=True))
    rows = None
    if device.type == "cuda":
        rows = Places.of(table, new, lengths, lengths, np.arange(len(lengths))).to(device)
    return Segments(
        torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32)).to(device),
        int(lengths.max()),
        rows,
        tuple(zip(num_rows, of_width, strict=True)),
        Places.of(table, new, lengths, widths, widths.argsort(kind="stable")).to(device),
        int(new.sum()),
    )


def kinds_of(widths: Integers) -> Integers:
    """Return the class of each attention width.

    Rows in one class share kernel blocking, so equal prefixes have equal bits. A width is a class of its own if
    its last block is neither full nor at most one piece. This holds for float32 with MKL in strict mode.
    """
    blocks, rest = np.divmod(widths, BLOCK)
    return np.where(rest == 0, 0, np.where(rest <= PIECE, 1 + blocks, -widths))


def tokens_of(keys: Integers, inside: Truths) -> tuple[Integers, Truths]:
    """Number tokens so that two have the same number if they and all tokens before them are equal.

    Args:
        keys: [b, 1 + L], a key of the row and of each of its tokens; tokens are equal if their keys are.
        inside: [b, L], True where a row has a token; from the left, without holes.

    Returns:
        The number of the token at each place [b, L], arbitrary where there is none. And [b, L], True at one
        place for each number.
    """
    keys = np.ascontiguousarray(keys)
    order = keys.view(np.dtype((np.void, keys.itemsize * keys.shape[1])))[:, 0].argsort(kind="stable")
    keys, inside = keys[order], inside[order]  # rows with a common prefix are adjacent now
    alike = np.logical_and.accumulate(keys[1:] == keys[:-1], axis=1)[:, 1:] & inside[1:]
    new = inside.copy()
    new[1:] &= ~alike
    number = new.cumsum().reshape(new.shape) - 1
    owner = np.maximum.accumulate(np.where(new, np.arange(len(new))[:, None], 0), axis=0)
    table, found = np.empty_like(number), np.empty_like(new)
    table[order], found[order] = np.take_along_axis(number, owner, axis=0), new
    return table, found


def padded_width(length: int) -> int:
    """Return a width that is at least the length, and under a quarter more or under 16 more.

    Few different widths exist, so rows share them.
    """
    step = max(SMALLEST_WIDTH, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


class Take(torch.autograd.Function):
    """Computes x[index] along the first axis; its gradient uses indices too, faster than a scatter-add.

    The gradient is the result's gradient at `back`, with 0 at `none`. The result's gradient at `again` is added
    at `repeated`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, back: Tensor, none: Tensor | None, again: Tensor, repeated: Tensor
    ) -> Tensor:
        ctx.back, ctx.none, ctx.again, ctx.repeated = back, none, again, repeated
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
    """
    strange = softcap is not None or s_aux is not None or position_bias is not None
    if segments is None or strange or not getattr(module, "is_causal", True):
        raise InvalidConfig("its attention is not plain causal attention")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
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
        bounds, longest = segments.bounds, segments.longest
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
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
    """
    is_float32 = query.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    if is_float32 and use_gqa_in_sdpa(attention_mask, key, value):
        key, value = for_each_head(query, key, value)
    output: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output


AttentionInterface.register(PACKED, packed_attention)
AttentionInterface.register("sdpa", padded_attention)


def remove_padding(body: Any, role: str, dtype: str = "float32") -> None:
    """Switch a model to packed attention, and test that it works.

    The test lays two short rows with a common prefix end to end; they must give the same numbers as separately.
    It detects every architecture in which tokens interact outside of transformers' attention interface.

    Args:
        body: a transformers model without its head.
        role: for the message.
        dtype: in which the role computes.

    Raises:
        InvalidConfig: the model gives other numbers or an error; the message says to set use_remove_padding.
    """
    device, kind = next(body.parameters()).device, getattr(torch, dtype)
    columns, near = torch.arange(7, device=device), 1e-3 if kind == torch.float32 else 0.1
    mask, positions = columns < torch.tensor([[7], [4]], device=device), columns.expand(2, 7)
    ids = torch.where(torch.tensor([[False], [True]], device=device) & (columns == 3), 5, columns)
    with torch.no_grad(), torch.autocast(device.type, kind, enabled=kind != torch.float32):
        alone = body(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)
        try:
            body.set_attn_implementation(PACKED)
            inputs, places = pack(ids, mask, positions)
            together = body(**inputs, use_cache=False).last_hidden_state[0][places[mask]]
            if not torch.allclose(together, alone.last_hidden_state[mask], near, near / 10):
                raise InvalidConfig("rows laid end to end change each other's numbers")
        except (InvalidConfig, RuntimeError, TypeError, ValueError) as error:
            raise InvalidConfig(
                f"{role}.model.use_remove_padding is true, but {type(body).__name__} cannot run without "
                f"padding ({error}); set it to false"
            ) from error


def is_packed(body: Any) -> bool:
    """Return whether remove_padding was called on the model."""
    config = getattr(body, "config", None)
    return config is not None and config._attn_implementation == PACKED
