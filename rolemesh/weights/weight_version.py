"""A version of the weights that this process holds, complete or still arriving."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import SharedRegion, WeightManifest
from rolemesh.weights.manifest import checksum, digest_of
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.stripes import HeldStripes
from rolemesh.weights.tensors import RegionTensors


class Notifier:
    """Wakes all coroutines that wait for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class WeightVersion:
    """A version held by this process, complete or still arriving.

    Its first `num_verified` bytes may be read and relayed; the engine may use it once all are verified. A
    region mapped from another process counts as verified as far as that process reports, and as whole only once
    sealed.

    Args:
        serialized: the manifest in wire format.
        manifest: the same manifest, parsed and checked.
        region: the bytes.
        role: how the version got here: "actor" published it, "rollout" pulled it.
        num_verified: leading bytes of the region that match the manifest; all, if only stripes are held.
        striped: which stripes are held; None: all of them.
        copies: where ranks of this group on other machines can open the same version.
    """

    def __init__(
        self,
        serialized: bytes,
        manifest: WeightManifest,
        region: WeightRegion,
        role: str,
        num_verified: int = 0,
        striped: HeldStripes | None = None,
        copies: Sequence[SharedRegion] = (),
    ) -> None:
        self.striped = striped
        self.copies = copies
        self.serialized = serialized
        self.manifest = manifest
        self.role = role
        self.version = manifest.version
        self.digest = digest_of(serialized)
        self.num_bytes = manifest.region_bytes
        self.num_verified = num_verified
        self._region: WeightRegion | None = region
        self._changed = Notifier()
        self._why_gone = ""

    @property
    def region(self) -> WeightRegion:
        if self._region is None:
            raise WeightsUnavailable(f"weights version {self.version} is no longer held: {self._why_gone}")
        return self._region

    @property
    def is_whole(self) -> bool:
        return self.num_verified == self.num_bytes and self.striped is None

    def tensors(self) -> RegionTensors:
        """Return views of the region, by name. Do not write to them. Each keeps the whole region in memory."""
        assert self.is_whole
        return RegionTensors(self.manifest, self.region)

    async def beyond(self, offset: int) -> int:
        """Wait until more than `offset` bytes are verified (or all), and return how many are.

        Raises:
            WeightsUnavailable: the version was released, or its transfer has stopped.
        """
        while self.num_verified <= offset and self.num_verified < self.num_bytes:
            if self._why_gone:
                have = f"weights version {self.version} is held as far as byte {self.num_verified}"
                raise WeightsUnavailable(f"{have}: {self._why_gone}")
            await self._changed.wait()
        self.region  # noqa: B018  # raises if it is gone
        return self.num_verified

    def verified_until(self, end: int) -> int:
        """Return how far the region is verified, after checking the whole pieces before byte `end`."""
        at = self.num_verified
        size = self.manifest.piece_bytes
        expected = self.manifest.piece_checksums
        while at < end and (after := min(at + size, self.num_bytes)) <= end:
            if checksum(self.region.read(at, after)) != expected[at // size]:
                break
            at = after
        return at

    def advance(self, num_verified: int) -> None:
        """Set `num_verified` and wake waiting readers. Seals the region once all of it is verified."""
        if num_verified == self.num_bytes:
            self.region.seal()
        self.num_verified = num_verified
        self._why_gone = ""
        self._changed.notify()

    def own(self) -> None:
        """Replace a region mapped from another process by one of our own, which this process can complete.

        The other process could still have changed its bytes, so the copy is verified again here. Call `advance`
        afterwards.
        """
        if not self.region.is_own:
            region = WeightRegion(self.num_bytes)
            arrived = self.num_verified
            region.write(0, self.region.read(0, arrived))
            self._region = region
            self.num_verified = 0
            self.num_verified = self.verified_until(arrived)

    def stop(self, why: str) -> None:
        """Record that the transfer has stopped, and wake waiting readers with the reason."""
        self._why_gone = why
        self._changed.notify()

    def close(self, why: str) -> None:
        """Release the memory and wake waiting readers with the reason."""
        self._region = None
        self.stop(why)
