"""The tensors of a version, as views of the region that holds its bytes."""

from __future__ import annotations

from torch import Tensor

from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import SharedRegion, WeightManifest
from rolemesh.weights.manifest import unpack
from rolemesh.weights.region import WeightRegion

# Path and name of a region, and the serialized manifest of its bytes; types that a remote call can serialize.
Place = tuple[str, str, bytes]


class RegionTensors(dict[str, Tensor]):
    """The tensors of a version by name. Each is a view of the region, and keeps its memory.

    Args:
        manifest: where each tensor lies.
        region: the bytes.
    """

    def __init__(self, manifest: WeightManifest, region: WeightRegion) -> None:
        super().__init__(unpack(manifest, region.tensor()))
        self.manifest = manifest
        self.region = region

    @property
    def place(self) -> Place:
        """Where another process of this machine can map the same memory, as long as this object exists.

        Raises:
            WeightsUnavailable: the region is private memory of this process.
        """
        if (shared := self.region.shared) is None:
            raise WeightsUnavailable(
                f"weights version {self.manifest.version} is in private memory of this process, so no other "
                "can map it: this system has no anonymous files of that size (ulimit -f)"
            )
        return shared.path, shared.name, self.manifest.SerializeToString()

    @classmethod
    def at(cls, place: Place) -> RegionTensors:
        """Map the memory of another process's tensors, which cannot change.

        Raises:
            WeightsUnavailable: it is not there, or not sealed.
        """
        path, name, serialized = place
        manifest = WeightManifest.FromString(serialized)
        region = WeightRegion.open(SharedRegion(path=path, name=name), manifest.region_bytes)
        if region is None or not region.is_sealed:
            raise WeightsUnavailable(f"weights version {manifest.version} cannot be mapped from {path}")
        return cls(manifest, region)
