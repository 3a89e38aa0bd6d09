"""Groups of rows that answer the same prompt, with sums, means and deviations over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """Maps each row to its group: the rows that answer the same prompt, wherever they are in the batch.

    Args:
        of_row: [B] int64, the group of each row.
        num: number of groups.
    """

    of_row: Tensor
    num: int

    @classmethod
    def of(cls, uid: Sequence[str], response_mask: Tensor) -> Groups:
        """Group rows with equal uid.

        Raises:
            ValueError: the number of uids is not the number of rows.
        """
        if len(uid) != len(response_mask):
            raise ValueError(
                f"expected one uid for each row; got {len(uid)} uids for {len(response_mask)} rows"
            )
        names, inverse = np.unique(np.asarray(uid, dtype=str), return_inverse=True)
        return cls(torch.from_numpy(inverse.reshape(-1)).to(response_mask.device), len(names))

    def sum(self, values: Tensor) -> Tensor:
        """Return [B, ...], for each row the sum of values [B, ...] over its group."""
        totals = values.new_zeros(self.num, *values.shape[1:]).index_add(0, self.of_row, values)
        return totals[self.of_row]

    def max(self, values: Tensor) -> Tensor:
        """Return [B], for each row the largest of values [B] in its group."""
        lowest = values.new_full((self.num,), -torch.inf)
        return lowest.scatter_reduce(0, self.of_row, values, "amax")[self.of_row]

    @property
    def size(self) -> Tensor:
        """Number of rows in each row's group, [B] float64."""
        return self.sum(torch.ones(len(self.of_row), dtype=torch.float64, device=self.of_row.device))

    def mean(self, values: Tensor) -> Tensor:
        """Return each group's mean μ [B] of values [B] float64; 0 in a group of one, which has no baseline."""
        return torch.where(self.size > 1, self.sum(values) / self.size, 0)

    def std(self, values: Tensor) -> Tensor:
        """Return each group's deviation σ [B] of values [B] float64, Bessel-corrected; 1 in a group of one."""
        squares = self.sum((values - self.mean(values)).square())
        return torch.where(self.size > 1, (squares / (self.size - 1).clamp(min=1)).sqrt(), 1)
