"""What one process holds of the weights."""

from __future__ import annotations

import asyncio

from rolemesh.errors import WeightsUnavailable
from rolemesh.weights.held import Bell, Holding


class WeightStore:
    """One version at a time, whole or arriving. All roles of a process share it: what the actor publishes is
    there for the rollout beside it, and WeightsService gives out what is there, whoever put it in."""

    def __init__(self) -> None:
        self._held: Holding | None = None
        self._changed = Bell()

    def put(self, holding: Holding) -> None:
        """Holds a version, and no other."""
        self.clear(f"version {holding.version} is held")
        self._held = holding
        self._changed.ring()

    def clear(self, why: str) -> None:
        """Holds none; those who read the one before are told."""
        if self._held is not None:
            self._held.close(why)
        self._held = None

    def find(self, version: int, digest: str) -> Holding | None:
        """The version, if it is held, be it in part."""
        held = self._held
        return held if held is not None and (held.version, held.digest) == (version, digest) else None

    async def get(self, version: int, digest: str, wait_s: float = 0.0) -> Holding:
        """The version, which may come within `wait_s` seconds.

        Raises:
            WeightsUnavailable: it is not held; the message names the one that is.
        """
        try:
            async with asyncio.timeout(wait_s):
                while (held := self.find(version, digest)) is None:
                    await self._changed.wait()
                return held
        except TimeoutError:
            raise WeightsUnavailable(
                f"weights version {version} is not held here; {self._now(version)}"
            ) from None

    def _now(self, version: int) -> str:
        if self._held is None:
            return "none is held"
        other = ", of another digest" if self._held.version == version else ""
        return f"version {self._held.version} is held{other}"
