"""Forward passes without padding: rows are laid end to end, and each token attends to its own row alone. What
rows have in common at their beginning (the prompt of a group's answers, a chat template) is there once: a
token's numbers follow from the tokens before it.

On a CPU rows of like lengths are given to one attention kernel together, padded to a width which depends on
the row's own length alone; so a row's bits do not depend on its neighbours. On CUDA, where the type allows, a
kernel for uneven lengths needs no padding at all. Attention is over whole rows either way: keys and values of
a beginning are copied to each row that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rolemesh.errors import InvalidConfig
from rolemesh.models.chunks import MIN_MATRIX_ROWS

PACKED = "rolemesh_packed"  # the name of packed_attention among transformers' attention functions
KERNEL_TYPES = (torch.float16, torch.bfloat16)  # of varlen_attn
SMALLEST_WIDTH = 16  # widths up to 64 are its multiples, then four for each doubling
# torch's CPU kernel sums over columns 512 at a time, and MKL over up to 384 in one piece.
BLOCK, PIECE = 512, 384

Integers = NDArray[np.int64]
Truths = NDArray[np.bool_]


@dataclass(frozen=True)
class Places:
    """Where the tokens of a pass lie row by row, those of a shared beginning in each of its rows.

    Args:
        tokens: [places] the token in each; behind a row's end, where there are such places, its last one again.
        first: [N] a place for each token.
        others: all places but these.
        again: those of them that hold a token, and are not behind a row's end.
        repeated: the tokens that these hold.
    """

    tokens: Tensor
    first: Tensor
    others: Tensor
    again: Tensor
    repeated: Tensor

    @classmethod
    def of(cls, table: Integers, new: Truths, lengths: Integers, widths: Integers, order: Integers) -> Places:
        """
        Args:
            table: [rows, longest] the token at each position of a row; behind its end anything.
            new: the same, where a row is the one that numbers the token.
            lengths: [rows] tokens.
            widths: [rows] places; at least as many.
            order: of the rows.
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
    """Rows laid end to end.

    Args:
        bounds: [rows + 1] int32, where each row begins among `rows`, and the end of the last.
        longest: tokens.
        rows: row after row; on CUDA, whose kernel for uneven lengths takes them so.
        buckets: (rows, width) of each group of rows that attention takes together.
        cells: bucket after bucket, each row padded to its bucket's width.
    """

    bounds: Tensor
    longest: int
    rows: Places | None
    buckets: tuple[tuple[int, int], ...]
    cells: Places


def pack(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> tuple[dict[str, Any], Tensor]:
    """A forward pass over the tokens of rows, equal beginnings once.

    Args:
        input_ids, attention_mask, position_ids: [b, S]; a row may have no token, but one of them has.

    Returns:
        input_ids and position_ids [1, N] and their segments; and [b, S], which of the N tokens is at each place
        (of padding: some other).
    """
    device = input_ids.device
    ids, positions = (x.to("cpu", torch.int64).numpy().ravel() for x in (input_ids, position_ids))
    mask = attention_mask.bool().cpu().numpy()
    lengths = mask.sum(1)
    widths = np.array([padded_width(int(length)) for length in lengths])
    inside = np.arange(lengths.max()) < lengths[:, None]  # [b, longest]: rows begin at the left here
    cell = np.zeros(inside.shape, np.int64)  # of [b * S]
    cell[inside] = mask.ravel().nonzero()[0]
    kinds = kinds_of(widths) if device.type == "cpu" else np.zeros_like(widths)
    keys = np.where(inside, positions[cell] << 32 | ids[cell], -1)
    table, new = tokens_of(np.column_stack([kinds, keys]), inside)
    num_tokens = int(new.sum())
    cell_of = np.empty(num_tokens, np.int64)
    cell_of[table[new]] = cell[new]
    places = np.zeros(mask.size, np.int64)
    places[cell[inside]] = table[inside]

    copies = -(-MIN_MATRIX_ROWS // num_tokens)  # of all rows, for matrices to have as many
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
    """See Places.of."""
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
    )


def kinds_of(widths: Integers) -> Integers:
    """Return the class of each attention width. Rows in one class share kernel blocking, so equal prefixes have
    equal bits. A last block that is neither full nor within one piece makes the width a class of its own.
    (float32; MKL in strict mode.)"""
    blocks, rest = np.divmod(widths, BLOCK)
    return np.where(rest == 0, 0, np.where(rest <= PIECE, 1 + blocks, -widths))


def tokens_of(keys: Integers, inside: Truths) -> tuple[Integers, Truths]:
    """Numbers tokens so that two have one number if they and all before them are alike.

    Args:
        keys: [b, 1 + L] what a row and each of its tokens must have in common with others.
        inside: [b, L], where a row has a token; from the left, without holes.

    Returns:
        The token at each place [b, L], where a row has none anything; and which row numbers each token.
    """
    keys = np.ascontiguousarray(keys)
    order = keys.view(np.dtype((np.void, keys.itemsize * keys.shape[1])))[:, 0].argsort(kind="stable")
    keys, inside = keys[order], inside[order]  # rows with a common beginning are neighbours now
    alike = np.logical_and.accumulate(keys[1:] == keys[:-1], axis=1)[:, 1:] & inside[1:]
    new = inside.copy()
    new[1:] &= ~alike
    number = new.cumsum().reshape(new.shape) - 1
    owner = np.maximum.accumulate(np.where(new, np.arange(len(new))[:, None], 0), axis=0)
    table, found = np.empty_like(number), np.empty_like(new)
    table[order], found[order] = np.take_along_axis(number, owner, axis=0), new
    return table, found


def padded_width(length: int) -> int:
    """Up to a quarter more than the length, and few different ones."""
    step = max(SMALLEST_WIDTH, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step


class Take(torch.autograd.Function):
    """x[index] along the first axis, and its gradient by an index as well, which is faster than to add it up
    everywhere: that of the result at `back`; 0 at `none`; and at `repeated` that at `again` is added."""

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
    """[N, ...] to [places, ...]. What follows must let no gradient flow to a place behind a row's end."""
    return taken(x, places.tokens, places.first, None, places.again, places.repeated)


def to_tokens(x: Tensor, places: Places) -> Tensor:
    """[places, ...] to [N, ...]."""
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
    if segments.rows and q.dtype in KERNEL_TYPES:
        bounds, longest = segments.bounds, segments.longest
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        q, k, v = (to_places(x, segments.rows) for x in (q, k, v))
        output = varlen_attn(
            q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window, enable_gqa=True
        )
        assert isinstance(output, Tensor)
        return to_tokens(output, segments.rows)[None], None
    sizes = [rows * width for rows, width in segments.buckets]
    # split and not slices: the gradient of a slice is as large as what it was cut from
    cells = [torch.split(to_places(x, segments.cells), sizes) for x in (q, k, v)]
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
    return to_tokens(torch.cat(outputs) if len(outputs) > 1 else outputs[0], segments.cells)[None], None


AttentionInterface.register(PACKED, packed_attention)


def remove_padding(body: Any, role: str) -> None:
    """From now on the model attends within the rows of a pass without padding.

    Whether it can is tried: two short rows end to end, which begin alike, must give what each gives alone. That
    tells apart every architecture whose tokens meet elsewhere than in transformers' attention interface.

    Args:
        body: a transformers model without its head.
        role: for the message.

    Raises:
        InvalidConfig: its numbers come out otherwise; use_remove_padding says so.
    """
    device = next(body.parameters()).device
    columns = torch.arange(7, device=device)
    mask = columns < torch.tensor([[7], [4]], device=device)
    ids, positions = columns.expand(2, 7), columns.expand(2, 7)
    ids = torch.where(torch.tensor([[False], [True]], device=device) & (columns == 3), 5, ids)
    with torch.no_grad():
        alone = body(input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False)
        try:
            body.set_attn_implementation(PACKED)
            inputs, places = pack(ids, mask, positions)
            together = body(**inputs, use_cache=False).last_hidden_state[0][places[mask]]
            if not torch.allclose(together, alone.last_hidden_state[mask], rtol=1e-3, atol=1e-4):
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
