"""Publishes a version of the weights: makes it from a model's tensors, and holds it in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from rolemesh.errors import WeightsUnavailable
from rolemesh.ranks.collective_errors import gather_texts, raise_on_all_ranks
from rolemesh.ranks.ranks import Ranks
from rolemesh.v1.weights_pb2 import SharedRegion, WeightManifest
from rolemesh.weights.manifest import checksum, checksums, digest_of, lay_out
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.stripes import STRIPE_PIECES, HeldStripes, Stripes
from rolemesh.weights.tensors import RegionTensors
from rolemesh.weights.weight_source import Fits
from rolemesh.weights.writing import Machines, WantedBytes, write_rows


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


class PublishedWeights:
    """A WeightSource of weights in this process. The actor publishes its `holding`.

    If the ranks are on several machines, the bytes are divided among them in stripes, and each machine's first
    rank has a `holding` to serve. Digest and bytes do not depend on ranks and machines.

    Args:
        version: of the weights.
        tensors: Hugging Face name to tensor, on any device; tied ones once
            (rolemesh.models.loading.named_weights). They are copied.
        deltas: name to a function that makes what is added to that tensor while copying; called one at a time.
        dtype: of floating-point tensors of two axes or more in the version; vectors are then float32. A
            tensor is cast on its device, after its delta was added. None: tensors keep their dtypes.
        ranks: over which the tensors are sharded. Every rank makes the version.
        serve: starts to serve this process's stripes, and returns host:port. It is called on the first rank of
            each machine except rank 0's. If a rank above 0 has none, rank 0 has all bytes.
        is_for_all: every machine gets all bytes, because its ranks use them.

    Attributes:
        has_part: whether this rank holds bytes of it; rank 0 does.

    Raises:
        WeightsUnavailable: a machine lacks the memory.
    """

    def __init__(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        deltas: Mapping[str, Callable[[], Tensor]] | None = None,
        ranks: Ranks | None = None,
        *,
        dtype: torch.dtype | None = None,
        serve: Callable[[], str] | None = None,
        is_for_all: bool = False,
    ) -> None:
        ranks = ranks or Ranks.alone()
        self._manifest = lay_out(version, tensors, dtype)
        machines = Machines.of(self._manifest.region_bytes, ranks)
        can_serve = not ranks.most(int(ranks.rank > 0 and serve is None))
        stripes = None
        receivers = [0]
        if is_for_all:  # nobody could map a region without a path
            receivers += [rank for rank in machines.holders[1:] if machines.shared[rank].path]
        elif can_serve and len(machines.holders) > 1:
            receivers = [*machines.holders]
            stripes = Stripes(STRIPE_PIECES * self._manifest.piece_bytes, len(machines.holders))
        write_rows(self._manifest, WantedBytes(machines, receivers, stripes), tensors, deltas or {}, ranks)
        self._region = machines.region if ranks.rank in receivers else WeightRegion(0)
        with raise_on_all_ranks(ranks):
            self._region.seal()
        self.has_part = ranks.rank in receivers
        self._copies = [machines.shared[rank] for rank in receivers[1:]] if stripes is None else []
        self._striped: HeldStripes | None = None
        if stripes is not None:
            with raise_on_all_ranks(ranks):
                address = serve() if serve and ranks.rank in receivers[1:] else ""
            addresses = gather_texts(ranks, address)
            number = receivers.index(machines.first[ranks.rank])
            self._striped = HeldStripes(stripes, number, [addresses[rank] for rank in receivers[1:]])
            self._sum_own_pieces(stripes, number if machines.is_holder else None, ranks)

    @property
    def version(self) -> int:
        return self._manifest.version

    @property
    def is_striped(self) -> bool:
        """True if the version is divided among several machines."""
        return self._striped is not None

    async def fetch(self, fits: Fits | None = None) -> RegionTensors:
        """WeightSource.fetch. Raises WeightsUnavailable, too, if this process has only stripes."""
        if self._striped:
            num_machines = self._striped.stripes.num_holders
            raise WeightsUnavailable(f"weights version {self.version} is divided among {num_machines} machines")
        tensors = RegionTensors(self._manifest, self._region)
        if fits:
            fits(tensors)
        return tensors

    def _sum_own_pieces(self, stripes: Stripes, holder: int | None, ranks: Ranks) -> None:
        """Compute the checksums of this holder's pieces, and get the others'. Every rank calls it."""
        size = self._manifest.piece_bytes
        end = self._manifest.region_bytes
        sums = torch.zeros(-(-end // size), dtype=torch.int64)
        own = [at for at in range(0, end, size) if stripes.holder_of(at) == holder]
        found = checksums(self._region.read(at, min(end, at + size)) for at in own)
        for at, each in zip(own, found, strict=True):
            sums[at // size] = each - (each >> 63 << 64)  # the same 64 bits, signed
        self._manifest.piece_checksums[:] = [each % (1 << 64) for each in ranks.total(sums).tolist()]

    @cached_property
    def holding(self) -> WeightVersion:
        """This version as a WeightStore takes it, on a rank that `has_part` of it.

        Unless the version is striped, the first access reads every byte to compute checksums.
        """
        manifest = self._manifest
        size = self._manifest.piece_bytes
        if not self._striped:
            pieces = (self._region.read(at, at + size) for at in range(0, manifest.region_bytes, size))
            manifest.piece_checksums[:] = checksums(pieces)
        serialized = manifest.SerializeToString(deterministic=True)
        return WeightVersion(
            serialized,
            manifest,
            self._region,
            "actor",
            num_verified=manifest.region_bytes,
            striped=self._striped,
            copies=self._copies,
        )
