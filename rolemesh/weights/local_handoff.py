"""Hands a version of the weights, which rank 0 has fetched, to the other ranks of its group.

The actor of such a group publishes the whole version on every machine (published.py). Each rank maps the region
of its machine, so nothing is copied. A rank that can map none pulls the version from its sources, as rank 0
did.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import SharedRegion
from rolemesh.weights.manifest import outline, read_manifest
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.tensors import RegionTensors
from rolemesh.weights.weight_source import Fits, WeightSource


def handoff_of(source: WeightSource) -> DataProto:
    """Describe a fetched version for `LocalWeightHandoff`.

    Returns:
        `manifest` [1, n] uint8, and in meta_info version, digest, sources, and path and name of each region.

    Raises:
        WeightsUnavailable: this process no longer holds it.
    """
    assert isinstance(source, PublishedWeights | RemoteWeights), f"{source} are the weights of no process"
    holding = source.holding
    regions = [[shared.path, shared.name] for shared in (holding.region.shared, *holding.copies) if shared]
    sources = source.sources if isinstance(source, RemoteWeights) else []
    meta = {"version": source.version, "digest": holding.digest, "sources": sources, "regions": regions}
    manifest = torch.frombuffer(bytearray(holding.serialized), dtype=torch.uint8)[None]
    return DataProto({"manifest": manifest}, meta_info=meta)


class LocalWeightHandoff:
    """A version that rank 0 hands to this rank.

    Args:
        described: by `handoff_of`.
        timeout_s: deadline in seconds to pull it from its sources, if no region can be mapped.
    """

    def __init__(self, described: DataProto, timeout_s: float) -> None:
        self.version = described.meta_info["version"]
        self.digest = described.meta_info["digest"]
        self._described = described
        self._timeout_s = timeout_s

    async def fetch(self, fits: Fits) -> Mapping[str, Tensor]:
        """Return its tensors, as WeightSource.fetch does.

        Raises:
            WeightsUnavailable: its manifest has another digest or does not fit, or no source has it.
        """
        meta_info = self._described.meta_info
        manifest = read_manifest(self._described["manifest"].numpy().tobytes(), self.version, self.digest)
        fits(outline(manifest))
        for path, name in meta_info["regions"]:
            region = WeightRegion.open(SharedRegion(path=path, name=name), manifest.region_bytes)
            if region is not None and region.is_sealed:
                return RegionTensors(manifest, region)
        if not meta_info["sources"]:
            raise WeightsUnavailable(
                f"weights version {self.version} is only in memory of other ranks, which this rank cannot map"
            )
        remote = RemoteWeights(meta_info["sources"], self.version, self.digest, timeout_s=self._timeout_s)
        return await remote.fetch(fits)
