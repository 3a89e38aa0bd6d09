"""Where a version of the weights can be had: in this process (held.py) or from others (remote.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

Fits = Callable[[Mapping[str, Tensor]], None]


class WeightSource(Protocol):
    """One version of the weights. Tensors have Hugging Face names and lie on the CPU."""

    @property
    def version(self) -> int:
        """Grows with every update."""
        ...

    async def fetch(self, fits: Fits | None = None) -> dict[str, Tensor]:
        """All tensors, whole and verified. Nobody writes to them: they may be kept and used as they are.

        Args:
            fits: sees their names, shapes and dtypes (on the device `meta`) before any byte of them is asked
                for, and raises WeightsUnavailable where they are not what is wanted.

        Raises:
            WeightsUnavailable: the version is gone, or what came does not match its manifest.
        """
        ...
