"""The responses to one prompt, and numbers over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Which rows answer the same prompt. A row's group may stand anywhere in the batch.

    Args:
        of_row: [B] int64, the group of each row.
        num: groups there are.
    """

    of_row: Tensor
    num: int

    @classmethod
    def of(cls, uid: Sequence[str], response_mask: Tensor) -> Groups:
        """The groups of rows with equal uid.

        Raises:
            ValueError: there is not one uid for each row.
        """
        if len(uid) != len(response_mask):
            raise ValueError(f"{len(uid)} uids for {len(response_mask)} rows")
        names, inverse = np.unique(np.asarray(uid, dtype=str), return_inverse=True)
        return cls(torch.from_numpy(inverse.reshape(-1)).to(response_mask.device), len(names))

    def sum(self, values: Tensor) -> Tensor:
        """[B, ...]: on each row the sum of values [B, ...] over its group."""
        totals = values.new_zeros(self.num, *values.shape[1:]).index_add(0, self.of_row, values)
        return totals[self.of_row]

    def max(self, values: Tensor) -> Tensor:
        """[B]: on each row the largest of values [B] in its group."""
        lowest = values.new_full((self.num,), -torch.inf)
        return lowest.scatter_reduce(0, self.of_row, values, "amax")[self.of_row]

    @property
    def size(self) -> Tensor:
        """[B] float64: rows in the row's group."""
        return self.sum(torch.ones(len(self.of_row), dtype=torch.float64, device=self.of_row.device))

    def mean(self, values: Tensor) -> Tensor:
        """μ [B] of values [B] float64; 0 in a group of one, which has nothing to be compared with."""
        return torch.where(self.size > 1, self.sum(values) / self.size, 0)

    def std(self, values: Tensor) -> Tensor:
        """σ [B] of values [B] float64, with Bessel's correction; 1 in a group of one."""
        squares = self.sum((values - self.mean(values)).square())
        return torch.where(self.size > 1, (squares / (self.size - 1).clamp(min=1)).sqrt(), 1)
