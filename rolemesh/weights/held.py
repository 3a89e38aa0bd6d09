"""A version of the weights, held in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cached_property

from torch import Tensor

from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import WeightManifest
from rolemesh.weights.manifest import checksum, digest_of, lay_out, tensor_bytes, unpack
from rolemesh.weights.region import Region
from rolemesh.weights.source import Fits


class Bell:
    """Wakes all who wait for the next change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()


class Holding:
    """A version as this process has it: its first `num_verified` bytes may be read and given on, and all of
    them used. Another process's region is verified as far as that one says, and whole only when it is sealed.

    Args:
        serialized: the manifest as it goes over the wire.
        manifest: the same, checked.
        region: the bytes.
        role: who made the version available here: "actor" published it, "rollout" pulled it.
        num_verified: how many of them are what the manifest says.
    """

    def __init__(
        self, serialized: bytes, manifest: WeightManifest, region: Region, role: str, num_verified: int = 0
    ) -> None:
        self.serialized, self.manifest, self.role = serialized, manifest, role
        self.version, self.digest = manifest.version, digest_of(serialized)
        self.num_bytes = manifest.region_bytes
        self.num_verified = num_verified
        self._region: Region | None = region
        self._changed = Bell()
        self._why_gone = ""

    @property
    def region(self) -> Region:
        if self._region is None:
            raise WeightsUnavailable(f"weights version {self.version} is held no longer: {self._why_gone}")
        return self._region

    @property
    def is_whole(self) -> bool:
        return self.num_verified == self.num_bytes

    def tensors(self) -> dict[str, Tensor]:
        """Views of the region, which nobody writes to. Whoever keeps one keeps the region."""
        assert self.is_whole
        return unpack(self.manifest, self.region.tensor())

    async def beyond(self, offset: int) -> int:
        """How many bytes are verified, as soon as they are more than `offset`.

        Raises:
            WeightsUnavailable: the version has been let go, or nobody gets the rest of it.
        """
        while self.num_verified <= offset and not self.is_whole:
            if self._why_gone:
                have = f"weights version {self.version} is held as far as byte {self.num_verified}"
                raise WeightsUnavailable(f"{have}: {self._why_gone}")
            await self._changed.wait()
        self.region  # noqa: B018  # raises if it is gone
        return self.num_verified

    def verified_until(self, end: int) -> int:
        """How far the region's first `end` bytes are what the manifest says, by whole pieces."""
        at, size = self.num_verified, self.manifest.piece_bytes
        expected = self.manifest.piece_checksums
        while at < end and (after := min(at + size, self.num_bytes)) <= end:
            if checksum(self.region.read(at, after)) != expected[at // size]:
                break
            at = after
        return at

    def advance(self, num_verified: int) -> None:
        """Lets others have what is verified."""
        if num_verified == self.num_bytes:
            self.region.seal()
        self.num_verified, self._why_gone = num_verified, ""
        self._changed.ring()

    def own(self) -> None:
        """Moves from another process's region, which that one no longer fills, to one of our own. `advance` is
        to follow: what only the other one has verified, and could still be changed, is verified here."""
        if not self.region.is_own:
            region, arrived = Region(self.num_bytes), self.num_verified
            region.write(0, self.region.read(0, arrived))
            self._region, self.num_verified = region, 0
            self.num_verified = self.verified_until(arrived)

    def stop(self, why: str) -> None:
        """Nobody gets the rest for now: those who wait for it are told."""
        self._why_gone = why
        self._changed.ring()

    def close(self, why: str) -> None:
        """Lets the memory go, also while others read it: they are told."""
        self._region = None
        self.stop(why)


class HeldWeights:
    """Implements rolemesh.weights.source.WeightSource.

    Args:
        version: of the weights.
        tensors: Hugging Face name to tensor, on any device; tied ones once
            (rolemesh.models.loading.named_weights). They are copied.
        deltas: by name, what is added to a tensor on its way; made one at a time.
    """

    def __init__(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        deltas: Mapping[str, Callable[[], Tensor]] | None = None,
    ) -> None:
        self._manifest = lay_out(version, tensors)
        self._region = Region(self._manifest.region_bytes)
        for spec, tensor in zip(self._manifest.weights, tensors.values(), strict=True):
            if deltas and spec.name in deltas:
                tensor = tensor + deltas[spec.name]()
            self._region.write(spec.offset, tensor_bytes(tensor.detach().cpu().contiguous()).data)
        self._region.seal()

    @property
    def version(self) -> int:
        return self._manifest.version

    async def fetch(self, fits: Fits | None = None) -> dict[str, Tensor]:
        tensors = unpack(self._manifest, self._region.tensor())
        if fits:
            fits(tensors)
        return tensors

    @cached_property
    def holding(self) -> Holding:
        """For a store. Reads every byte once, for the checksums, when first asked."""
        manifest, size = self._manifest, self._manifest.piece_bytes
        pieces = (self._region.read(at, at + size) for at in range(0, manifest.region_bytes, size))
        manifest.piece_checksums[:] = [checksum(piece) for piece in pieces]
        serialized = manifest.SerializeToString(deterministic=True)
        return Holding(serialized, manifest, self._region, "actor", manifest.region_bytes)
