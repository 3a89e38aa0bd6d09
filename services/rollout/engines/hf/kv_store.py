"""Stores the keys and values of rows that another request may continue."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Layers = list[tuple[Tensor, Tensor]]  # keys and values [1, heads, columns, head_dim] of each layer


@dataclass(frozen=True, eq=False)
class KeptRow:
    """Keys and values of a prompt and the first tokens of a response.

    Args:
        prompt: the prompt's bytes.
        response: [n] int64, the tokens whose keys and values are kept.
        layers: keys and values of P + n columns.
    """

    prompt: bytes
    response: NDArray[np.int64]
    layers: Layers

    @property
    def num_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class KeptRows:
    """The most recently used rows, as many as fit into `max_bytes`.

    A row is found by its content, so it cannot be another's. The keys and values of a token depend on the
    weights and the tokens before it alone, so those of any common beginning serve.

    Args:
        max_bytes: limit of the stored keys and values together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._rows: OrderedDict[KeptRow, None] = OrderedDict()  # the one used last is last
        self._by_prompt: dict[bytes, list[KeptRow]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, prompt: bytes, response: NDArray[np.int64]) -> tuple[KeptRow, int] | None:
        """Return the row that has most of the response's first tokens, and how many. It counts as used.

        Returns:
            None if no row has the prompt.
        """
        found = [(row, _in_common(row.response, response)) for row in self._by_prompt.get(prompt, ())]
        if not found:
            return None
        best = max(found, key=lambda each: each[1])
        self._rows.move_to_end(best[0])
        return best

    def keep(self, row: KeptRow) -> None:
        """Keep a row instead of those that it continues. Evict the least recently used ones to make room."""
        for other in list(self._by_prompt.get(row.prompt, ())):
            if _in_common(other.response, row.response) == len(other.response):
                self._drop(other)
        if row.num_bytes > self.max_bytes:
            return
        self._rows[row] = None
        self._by_prompt.setdefault(row.prompt, []).append(row)
        self.num_bytes += row.num_bytes
        while self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._rows)))

    def clear(self) -> None:
        """Drop all rows."""
        self._rows.clear()
        self._by_prompt.clear()
        self.num_bytes = 0

    def _drop(self, row: KeptRow) -> None:
        del self._rows[row]
        self._by_prompt[row.prompt].remove(row)
        if not self._by_prompt[row.prompt]:
            del self._by_prompt[row.prompt]
        self.num_bytes -= row.num_bytes


def _in_common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return the length of the common beginning."""
    n = min(len(one), len(other))
    different = (one[:n] != other[:n]).nonzero()[0]
    return int(different[0]) if len(different) else n
