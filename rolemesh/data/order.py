"""Picks the prompts of batch k, as a pure function of the seed and k.

So a resumed run needs no saved iterator, only a number: its step, or with dynamic sampling the number of
batches answered so far.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rolemesh.config.data import DataConfig
from rolemesh.errors import InvalidData

Rows = NDArray[np.int64]


class PromptOrder:
    """A stream of epochs over all rows, each in its own order, cut into batches.

    Batches continue across the end of an epoch: a batch that an epoch does not fill is filled from the next
    one. So no row is skipped, even if the batch size does not divide the rows. No batch holds a row twice: if a
    batch spans two epochs, the later epoch begins with rows that are not in the earlier one's tail.

    Args:
        num_rows: rows of the data set.
        config: gen_batch_size, train_batch_size, shuffle, seed.

    Raises:
        InvalidData: fewer rows than a batch needs.
    """

    def __init__(self, num_rows: int, config: DataConfig) -> None:
        self.num_rows = num_rows
        self.batch_size = config.prompts_at_once
        if num_rows < self.batch_size:
            key = "gen_batch_size" if config.gen_batch_size else "train_batch_size"
            raise InvalidData(f"{num_rows} prompts do not fill one batch of data.{key} {self.batch_size}")
        self._seed = config.seed if config.shuffle else None
        self._epoch, self._order = 0, self._permutation(0)

    def total_steps(self, total_epochs: int) -> int:
        """Number of whole batches in `total_epochs` epochs."""
        return total_epochs * self.num_rows // self.batch_size

    def epoch(self, batch: int) -> int:
        """Epoch, counted from 0, in which batch `batch` (counted from 1) begins."""
        return (batch - 1) * self.batch_size // self.num_rows

    def rows(self, batch: int) -> Rows:
        """Rows of batch `batch` (counted from 1): [batch_size] int64."""
        if batch < 1:
            raise ValueError(f"batches count from 1; got {batch}")
        epoch, start = divmod((batch - 1) * self.batch_size, self.num_rows)
        head = self._epoch_order(epoch)[start : start + self.batch_size]
        missing = self.batch_size - len(head)
        return np.concatenate([head, self._epoch_order(epoch + 1)[:missing]]) if missing else head.copy()

    def _epoch_order(self, epoch: int) -> Rows:
        """Order of an epoch: [num_rows] int64.

        It depends on the previous epoch's tail. So it is computed forward from the epoch asked for last, or
        from epoch 0.
        """
        if epoch < self._epoch:
            self._epoch, self._order = 0, self._permutation(0)
        while self._epoch < epoch:
            left = (self._epoch + 1) * self.num_rows % self.batch_size
            tail = self._order[self.num_rows - left :]
            self._epoch += 1
            self._order = _without_at_start(
                self._permutation(self._epoch), tail, (self.batch_size - left) % self.batch_size
            )
        return self._order

    def _permutation(self, epoch: int) -> Rows:
        return np.arange(self.num_rows) if self._seed is None else permutation(self.num_rows, self._seed, epoch)


def permutation(num_rows: int, seed: int, epoch: int) -> Rows:
    """Permute num_rows rows by (seed, epoch), by sorting raw Philox words.

    numpy keeps the stream of raw Philox words the same in all versions, unlike Generator.permutation.
    """
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(words, kind="stable").astype(np.int64)


def _without_at_start(order: Rows, unwanted: Rows, num_first: int) -> Rows:
    """Move the first `num_first` rows that are not in `unwanted` to the front; keep the others in order."""
    if not len(unwanted):
        return order
    allowed = np.flatnonzero(~np.isin(order, unwanted))[:num_first]
    return np.concatenate([order[allowed], np.delete(order, allowed)])
