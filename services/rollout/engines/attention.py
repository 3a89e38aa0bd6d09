"""Keys and values of the engine hf, and the attention over them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin

GROUPED_ATTENTION = "rolemesh_grouped"  # its name in transformers' table


class Columns(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values [b, heads, W, head_dim], written from the left and read that far."""

    is_sliding = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width, self._filled = width, 0
        self._kept: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, head_dim = key_states.shape
        self.keys = key_states.new_empty(rows, heads, self._width, head_dim)
        self.values = value_states.new_empty(rows, heads, self._width, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._kept is not None:
            self.keys, self.values = (x.index_select(0, self._kept) for x in (self.keys, self.values))
            self._kept = None
        start, self._filled = self._filled, self._filled + key_states.shape[2]
        self.keys[:, :, start : self._filled] = key_states
        self.values[:, :, start : self._filled] = value_states
        return self.keys[:, :, : self._filled], self.values[:, :, : self._filled]

    def keep(self, rows: Tensor) -> None:
        """Leaves only these rows, in this order; once attention needs them, as what is copied then is in the
        processor's cache for it."""
        self._kept = rows if self._kept is None else self._kept[rows]

    def forget(self) -> None:
        """Leaves nothing in it."""
        self._filled, self._kept, self.is_initialized = 0, None, False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._filled + query_length, 0

    def get_seq_length(self) -> int:
        return self._filled

    def get_max_length(self) -> int:
        return self._width


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in which several query heads [b, heads, n, head_dim] share one of keys and values. Under a mask
    transformers copies keys and values for each head, at every token; the CPU's kernel need not have that. One
    token's heads that share are given to it as so many tokens: keys and values are read once."""
    rows, heads, tokens = query.shape[:3]
    shared = key.shape[1]
    if tokens == 1:
        query = query.view(rows, shared, heads // shared, -1)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != shared
    )
    if tokens == 1:
        return output.reshape(rows, 1, heads, -1), None
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)
