"""Publishes a version of the weights: makes it from a model's tensors, and holds it in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from rolemesh.errors import WeightsUnavailable
from rolemesh.ranks.collective_errors import gather_texts, raise_on_all_ranks
from rolemesh.ranks.ranks import Ranks
from rolemesh.weights.manifest import checksums, lay_out
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.stripes import STRIPE_PIECES, HeldStripes, Stripes
from rolemesh.weights.tensors import RegionTensors
from rolemesh.weights.weight_source import Fits
from rolemesh.weights.weight_version import WeightVersion
from rolemesh.weights.writing import Machines, WantedBytes, write_rows


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
