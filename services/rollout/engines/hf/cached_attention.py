"""Keys and values of engine hf, and the two passes that read them: over prompts, and over single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rolemesh.errors import InvalidConfig
from rolemesh.models.packed.attention import for_each_head

GROUPED_ATTENTION = "rolemesh_grouped"  # name under which transformers finds it


class Columns:
    """One layer's keys and values [b, heads, W, head_dim] of some rows, filled from the left.

    Args:
        rows: b.
        width: W.
    """

    def __init__(self, rows: int, width: int) -> None:
        self._rows = rows
        self._width = width
        self._keys: Tensor | None = None
        self._values: Tensor
        self._staying: Tensor | None = None

    def write(self, first: int, keys: Tensor, values: Tensor) -> None:
        """Fill the columns from 0 on of the rows from `first` on.

        Args:
            first: a row.
            keys, values: [rows, heads, columns, head_dim].
        """
        if self._keys is None:
            heads, _, wide = keys.shape[1:]
            wide_values = values.shape[-1]
            self._keys = keys.new_empty(self._rows, heads, self._width, wide)
            self._values = values.new_empty(self._rows, heads, self._width, wide_values)
        end = first + len(keys)
        self._keys[first:end, :, : keys.shape[2]] = keys
        self._values[first:end, :, : keys.shape[2]] = values

    def add(self, column: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one column of the first rows, and return their columns up to it.

        Args:
            column: its number.
            keys, values: [rows, heads, head_dim].

        Returns:
            keys and values [rows, heads, column + 1, head_dim].
        """
        assert self._keys is not None, "a column comes after the prompt"
        if self._staying is not None:
            self._keys = self._keys.index_select(0, self._staying)
            self._values = self._values.index_select(0, self._staying)
            self._staying = None
        rows = len(keys)
        end = column + 1
        self._keys[:rows, :, column] = keys
        self._values[:rows, :, column] = values
        return self._keys[:rows, :, :end], self._values[:rows, :, :end]

    def stay(self, rows: Tensor) -> None:
        """Keep only these rows, in this order.

        The copy is made at the next `add`, so the copied rows are still in the CPU's cache for attention.
        """
        self._staying = rows if self._staying is None else self._staying[rows]

    def copy(self, row: int, end: int) -> tuple[Tensor, Tensor]:
        """Return copies of a row's keys and values [1, heads, end, head_dim]."""
        assert self._keys is not None
        at = row if self._staying is None else int(self._staying[row])
        return self._keys[at : at + 1, :, :end].clone(), self._values[at : at + 1, :, :end].clone()


class AttentionPass(Protocol):
    """One forward pass, as each layer's attention sees it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Compute attention.

        Args:
            layer: its number.
            query, key, value: [b, heads, n, head_dim]; keys and values may have fewer heads.
            scaling: of the products; None: by the root of head_dim.

        Returns:
            [b, n, heads, head_dim].
        """
        ...


@dataclass
class Reading:
    """A pass over whole rows from their beginning, each token seeing those before it.

    Args:
        visible: [b, n] bool, False on padding.
        targets: where the keys and values go: the columns of all layers, the first row there, and which of the
            b rows it and those after it are.
    """

    visible: Tensor
    targets: Sequence[tuple[list[Columns], int, Tensor]]
    _mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        n = self.visible.shape[1]
        see = torch.ones(n, n, dtype=torch.bool, device=self.visible.device).tril()
        # Padding attends to itself: a softmax over no token would be NaN, and NaN would spread to other tokens.
        self._mask = (self.visible[:, None, None] & see) | torch.eye(n, dtype=torch.bool, device=see.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        for columns, first, rows in self.targets:
            columns[layer].write(first, key.index_select(0, rows), value.index_select(0, rows))
        key, value = for_each_head(query, key, value)
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self._mask,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Token:
    """One token of each of some rows, at the same place in all of them.

    Args:
        columns: of all layers, whose first rows these are.
        mask: [rows, 1, 1, column + 1] 0 on the tokens of a row and -inf on its padding.
        rows: number of rows.
        column: of the token.
    """

    columns: list[Columns]
    mask: Tensor
    rows: int
    column: int


@dataclass(frozen=True)
class Decoding:
    """A pass over single tokens [1, n], which are those of `tokens` one after another, then fillers.

    A row's tokens come in their order. Query heads that share a head of keys and values are passed to the
    kernel as several tokens, so keys and values are read once, and not copied for each of these heads.
    """

    tokens: Sequence[Token]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [n, heads, head_dim]
        n, heads = query.shape[:2]
        shared = key.shape[1]
        query = query.reshape(n, shared, heads // shared, -1)
        outputs = []
        begin = 0
        for token in self.tokens:
            end = begin + token.rows
            keys, values = token.columns[layer].add(token.column, key[begin:end], value[begin:end])
            outputs.append(
                F.scaled_dot_product_attention(
                    query[begin:end], keys, values, attn_mask=token.mask, scale=scaling
                )
            )
            begin = end
        together = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).reshape(begin, heads, -1)
        return F.pad(together, (0, 0, 0, 0, 0, n - begin))[None] if begin < n else together[None]


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    reading: AttentionPass,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of a pass, with the signature that transformers calls.

    Raises:
        InvalidConfig: the architecture needs something else.
    """
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise InvalidConfig("its attention has a soft cap, sinks or a bias")
    return reading.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
