"""Rows at the same token, which share the tensors of their keys and values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import torch
from torch import Tensor

from rolemesh.config.rollout import SamplingConfig
from rolemesh.services.rollout.engines.hf.cached_attention import Columns, Token

# Compaction copies keys and values, so it waits until a quarter of the rows have ended. With responses of
# uneven length this takes half the time of no compaction. A tenth or a half of the rows saves less.
COMPACT_AT = 0.75


class RowGroup:
    """b rows that have equally many response tokens. Finished rows stay until the next compaction.

    Args:
        slots: of the rows, their places in the batch's tensors.
        starts: how many response tokens of each row have keys and values already, ascending.
        t: how many response tokens each row has.
        visible: [b, P] bool, the prompts' tokens.
        num_tokens: T.
        num_layers: of the model.
        sampling: of all rows.
        dtype: in which the engine computes.

    Attributes:
        begin: how many response tokens the rows had at first; t grows from there.
        filled: how many of its response tokens have keys and values in every row that had fewer.
        versions: of the tokens sampled here.
        is_canonical: keys and values are those that any engine computes for these tokens (engines/hf).
    """

    def __init__(
        self,
        slots: list[int],
        starts: list[int],
        t: int,
        *,
        visible: Tensor,
        num_tokens: int,
        num_layers: int,
        sampling: SamplingConfig,
        dtype: torch.dtype,
    ) -> None:
        device = visible.device
        rows, width = visible.shape
        self.slots = slots
        self.starts = starts
        self.t = t
        self.sampling = sampling
        self.begin = t
        self.filled = starts[0]
        self.versions: list[int] = []
        self.is_canonical = True
        self.index = torch.tensor(slots, device=device)
        self._cells = self.index * num_tokens
        self._positions = visible.sum(1)
        self._mask = torch.zeros(rows, 1, 1, width + num_tokens, dtype=dtype, device=device)
        self._mask[:, 0, 0, :width].masked_fill_(~visible, -torch.inf)
        self._width = width
        self._num_tokens = num_tokens
        self._num_layers = num_layers
        self.columns = self._empty_columns()
        self._is_done = [False] * rows
        self.num_unfinished = rows

    def __len__(self) -> int:
        return len(self.slots)

    def _empty_columns(self) -> list[Columns]:
        width = self._width + self._num_tokens
        return [Columns(len(self), width) for _ in range(self._num_layers)]

    def forget(self) -> None:
        """Forget keys and values."""
        self.columns, self.starts, self.filled = self._empty_columns(), [0] * len(self), 0

    def pending(self) -> Iterator[tuple[int, int]]:
        """Yield each token without keys and values, with the number of rows, the first ones, that need it."""
        for i in range(self.filled, self.t):
            yield i, bisect_right(self.starts, i)

    def token(self, i: int, rows: int) -> Token:
        """Return response token i of the first rows."""
        column = self._width + i
        return Token(self.columns, self._mask[:rows, :, :, : column + 1], rows, column)

    def cells(self, i: int, rows: int | None = None) -> Tensor:
        """Return where response token i of each of the first rows is in tensors [slots, T], flat."""
        return self._cells[:rows] + i

    def positions(self, i: int, rows: int) -> Tensor:
        """Return the positions of response token i in the first rows."""
        return self._positions[:rows] + i

    def finish(self, row: int) -> bool:
        """Mark a row as finished. False if it was."""
        if self._is_done[row]:
            return False
        self._is_done[row] = True
        self.num_unfinished -= 1
        return True

    @property
    def unfinished(self) -> list[int]:
        return [row for row, is_done in enumerate(self._is_done) if not is_done]

    @property
    def is_sparse(self) -> bool:
        """True if enough rows have ended for a compaction."""
        return self.num_unfinished <= COMPACT_AT * len(self)

    def compact(self) -> list[int]:
        """Remove the finished rows. Return their slots."""
        staying = self.unfinished
        left = [slot for slot, is_done in zip(self.slots, self._is_done, strict=True) if is_done]
        rows = torch.tensor(staying, device=self.index.device, dtype=torch.int64)
        self.slots, self.starts = ([of[row] for row in staying] for of in (self.slots, self.starts))
        self._is_done = [False] * len(staying)
        self.index, self._cells, self._positions, self._mask = (
            of[rows] for of in (self.index, self._cells, self._positions, self._mask)
        )
        for columns in self.columns:
            columns.stay(rows)
        return left
