"""A version of the weights, held in this process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.errors import InvalidBatch
from rolemesh.v1.weights_pb2 import WeightManifest
from rolemesh.weights.manifest import aligned, tensor_bytes, weight_spec


class HeldWeights:
    """Implements rolemesh.weights.source.WeightSource. The tensors must not change while they are held.

    Args:
        version: of the weights.
        tensors: Hugging Face name to tensor, on the CPU; tied ones once
            (rolemesh.models.loading.named_weights).
    """

    def __init__(self, version: int, tensors: dict[str, Tensor]) -> None:
        self._version = version
        # A view of each tensor's memory; only one that is not contiguous is copied.
        self._tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}

    @property
    def version(self) -> int:
        return self._version

    @property
    def address(self) -> str | None:
        return None

    async def fetch(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    @cached_property
    def manifest(self) -> WeightManifest:
        """Names, dtypes, shapes, offsets and checksums. Reads every byte once, when first asked."""
        manifest, offset = WeightManifest(version=self._version), 0
        for name, tensor in self._tensors.items():
            spec = weight_spec(name, tensor, aligned(offset))
            manifest.weights.append(spec)
            offset = spec.offset + spec.num_bytes
        manifest.region_bytes = offset
        return manifest

    @cached_property
    def _spans(self) -> list[tuple[int, NDArray[np.uint8]]]:
        """Where in the region each tensor begins, and its bytes."""
        return [
            (spec.offset, tensor_bytes(tensor))
            for spec, tensor in zip(self.manifest.weights, self._tensors.values(), strict=True)
        ]

    def read(self, offset: int, length: int, part_bytes: int) -> Iterator[bytes]:
        """The bytes [offset, offset + length) of the region, in parts. Between tensors lie zeros.

        Raises:
            InvalidBatch: they reach beyond the region.
        """
        if offset + length > self.manifest.region_bytes:
            raise InvalidBatch(
                f"bytes {offset} to {offset + length} of a region of {self.manifest.region_bytes} "
                f"(weights version {self._version})"
            )
        for start in range(offset, offset + length, part_bytes):
            yield self._part(start, min(part_bytes, offset + length - start))

    def _part(self, start: int, length: int) -> bytes:
        part = np.zeros(length, np.uint8)
        # From the last tensor that begins at or before the part.
        first = max(0, bisect_right(self._spans, start, key=lambda span: span[0]) - 1)
        for at, source in self._spans[first:]:
            if at >= start + length:
                break
            low, high = max(at, start), min(at + len(source), start + length)
            if low < high:
                part[low - start : high - start] = source[low - at : high - at]
        return part.tobytes()
