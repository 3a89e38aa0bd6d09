"""Interface of a source of weights: this process (published.py) or other processes (remote.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

Fits = Callable[[Mapping[str, Tensor]], None]


class WeightSource(Protocol):
    """One version of the weights. Tensors have Hugging Face names and lie on the CPU."""

    @property
    def version(self) -> int:
        """Number of the version; it grows with every update."""
        ...

    async def fetch(self, fits: Fits | None = None) -> dict[str, Tensor]:
        """Return all tensors, whole and verified. They are never written to, so callers may keep and use them.

        Args:
            fits: gets their names, shapes and dtypes (on the device `meta`) before any of their bytes are
                requested, and raises WeightsUnavailable if they are unsuitable.

        Raises:
            WeightsUnavailable: the version is gone, or the received bytes do not match its manifest.
        """
        ...
