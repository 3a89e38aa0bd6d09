"""Stores the version of the weights that a process holds."""

from __future__ import annotations

import asyncio

from rolemesh.errors import WeightsUnavailable
from rolemesh.weights.weight_version import Notifier, WeightVersion


class WeightStore:
    """Holds one version at a time, whole or arriving. All roles of a process share the store.

    The actor publishes into it, a rollout in the same process reads from it or pulls into it, and
    WeightsService serves its content.
    """

    def __init__(self) -> None:
        self._held: WeightVersion | None = None
        self._changed = Notifier()

    def put(self, holding: WeightVersion) -> None:
        """Hold this version, and release the one before."""
        self.clear(f"version {holding.version} is held")
        self._held = holding
        self._changed.notify()

    def clear(self, why: str) -> None:
        """Release the version held; its waiting readers get the reason."""
        if self._held is not None:
            self._held.close(why)
        self._held = None

    def find(self, version: int, digest: str) -> WeightVersion | None:
        """Return the version if it is held, even in part; else None."""
        held = self._held
        return held if held is not None and (held.version, held.digest) == (version, digest) else None

    async def get(self, version: int, digest: str, wait_s: float = 0.0) -> WeightVersion:
        """Return the version, waiting up to `wait_s` seconds for it to arrive.

        Raises:
            WeightsUnavailable: it is not held; the message names the version that is.
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
