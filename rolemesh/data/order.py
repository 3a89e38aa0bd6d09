"""Which prompts belong to batch k: a pure function of the seed and k, so that a resumed run needs no saved
iterator, only a number: its step's, or with dynamic sampling how many batches have been answered."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rolemesh.config.data import DataConfig
from rolemesh.errors import InvalidData

Rows = NDArray[np.int64]


class PromptOrder:
    """Epoch after epoch of all rows, each in an order of its own, cut into batches.

    The stream runs on across the end of an epoch: a batch that the epoch does not fill is filled from the
    next one, so that no row is skipped however the numbers divide. No batch holds a row twice: where one
    spans two epochs, the later epoch begins with rows that the earlier one's tail does not hold.

    Args:
        num_rows: rows of the data set.
        config: gen_batch_size, train_batch_size, shuffle, seed.

    Raises:
        InvalidData: fewer rows than a batch needs.
    """

    def __init__(self, num_rows: int, config: DataConfig) -> None:
        self.num_rows, self.batch_size = num_rows, config.prompts_at_once
        if num_rows < self.batch_size:
            key = "gen_batch_size" if config.gen_batch_size else "train_batch_size"
            raise InvalidData(f"{num_rows} prompts do not fill one batch of data.{key} {self.batch_size}")
        self._seed = config.seed if config.shuffle else None
        self._epoch, self._order = 0, self._permutation(0)

    def total_steps(self, total_epochs: int) -> int:
        """Whole batches in so many epochs."""
        return total_epochs * self.num_rows // self.batch_size

    def epoch(self, batch: int) -> int:
        """The epoch, from 0, in which batch `batch` (from 1) begins."""
        return (batch - 1) * self.batch_size // self.num_rows

    def rows(self, batch: int) -> Rows:
        """The rows of batch `batch`, counted from 1: [batch_size] int64."""
        if batch < 1:
            raise ValueError(f"batches count from 1; got {batch}")
        epoch, start = divmod((batch - 1) * self.batch_size, self.num_rows)
        head = self._epoch_order(epoch)[start : start + self.batch_size]
        missing = self.batch_size - len(head)
        return np.concatenate([head, self._epoch_order(epoch + 1)[:missing]]) if missing else head.copy()

    def _epoch_order(self, epoch: int) -> Rows:
        """An epoch's order depends on the tail of the one before, so it is followed from the last one asked
        for, or from the first."""
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
    """A permutation of num_rows rows by (seed, epoch). It sorts raw Philox words, whose stream numpy keeps
    the same in all versions (that of Generator.permutation it does not)."""
    words = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(words, kind="stable").astype(np.int64)


def _without_at_start(order: Rows, unwanted: Rows, num_first: int) -> Rows:
    """The same rows, the unwanted ones among the first moved behind the first `num_first` others."""
    if not len(unwanted):
        return order
    allowed = np.flatnonzero(~np.isin(order, unwanted))[:num_first]
    return np.concatenate([order[allowed], np.delete(order, allowed)])
