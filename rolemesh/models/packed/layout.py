"""Where the tokens of rows that are laid end to end lie: `pack` makes the inputs of a pass.

On a CPU, rows of similar lengths go to one attention kernel together, padded to a width that depends only on
the row's own length. So a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.models.chunks import MIN_MATRIX_ROWS
from rolemesh.ranks.ulysses import Ulysses

SMALLEST_WIDTH = 16  # widths up to 128 are its multiples; beyond, there are four widths per doubling
# torch's CPU attention kernel sums over blocks of 512 columns, and MKL over up to 384 columns in one piece.
BLOCK = 512
PIECE = 384

CPU = torch.device("cpu")

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
        inside = offset < lengths[row]
        at = np.minimum(offset, lengths[row] - 1)
        tokens = table[row, at]
        is_first = inside & new[row, at]
        first = np.empty(int(new.sum()), np.int64)
        first[tokens[is_first]] = is_first.nonzero()[0]
        again = (inside & ~is_first).nonzero()[0]
        arrays = (tokens, first, (~is_first).nonzero()[0], again, tokens[again])
        return cls(*map(torch.from_numpy, arrays))


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


def pack(
    input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, device: torch.device = CPU
) -> tuple[dict[str, Any], Tensor]:
    """Prepare a forward pass over the tokens of rows; shared prefixes occur once.

    Args:
        input_ids, attention_mask, position_ids: [b, S] on the CPU; a row may have no token, but at least one
            row has some.
        device: that will compute the pass.

    Returns:
        The model's inputs, still on the CPU: input_ids and position_ids [1, N], and segments. And [b, S], the
        index of each cell's token among the N (arbitrary for padding).
    """
    ids, positions = (x.to(torch.int64).numpy().ravel() for x in (input_ids, position_ids))
    mask = attention_mask.bool().numpy()
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
    inputs = {name: torch.from_numpy(column) for name, column in laid.items()}
    return {**inputs, "segments": segments}, torch.from_numpy(places).view(mask.shape)


def segments_of(
    table: Integers, new: Truths, lengths: Integers, widths: Integers, device: torch.device
) -> Segments:
    """Make the Segments of rows for a pass on a device; for the other arguments see Places.of."""
    of_width, num_rows = (array.tolist() for array in np.unique(widths[widths > 0], return_counts=True))
    rows = None
    if device.type == "cuda":
        rows = Places.of(table, new, lengths, lengths, np.arange(len(lengths)))
    return Segments(
        torch.from_numpy(np.append(0, lengths.cumsum()).astype(np.int32)),
        int(lengths.max()),
        rows,
        tuple(zip(num_rows, of_width, strict=True)),
        Places.of(table, new, lengths, widths, widths.argsort(kind="stable")),
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
    # rows with a common prefix are adjacent now
    keys = keys[order]
    inside = inside[order]
    alike = np.logical_and.accumulate(keys[1:] == keys[:-1], axis=1)[:, 1:] & inside[1:]
    new = inside.copy()
    new[1:] &= ~alike
    number = new.cumsum().reshape(new.shape) - 1
    owner = np.maximum.accumulate(np.where(new, np.arange(len(new))[:, None], 0), axis=0)
    table = np.empty_like(number)
    found = np.empty_like(new)
    table[order] = np.take_along_axis(number, owner, axis=0)
    found[order] = new
    return table, found


def padded_width(length: int) -> int:
    """Return a width that is at least the length, and under a quarter more or under 16 more.

    Few different widths exist, so rows share them.
    """
    step = max(SMALLEST_WIDTH, (1 << (length - 1).bit_length()) // 8)
    return -(-length // step) * step
