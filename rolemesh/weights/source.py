"""Where a version of the weights can be had: in this process (held.py) or from another (remote.py)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """One version of the weights. Tensors have Hugging Face names and lie on the CPU."""

    @property
    def version(self) -> int:
        """Grows with every update."""
        ...

    @property
    def address(self) -> str | None:
        """host:port of a WeightsService that holds the version; None: it is in this process alone."""
        ...

    async def fetch(self) -> dict[str, Tensor]:
        """All tensors, whole and verified.

        Raises:
            WeightsUnavailable: the version is gone, or what came does not match its manifest.
        """
        ...
