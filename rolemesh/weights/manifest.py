"""What a version of the weights consists of, byte by byte (WeightManifest of weights.proto)."""

from __future__ import annotations

import math

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.errors import WeightsUnavailable
from rolemesh.rpc.dtypes import FROM_WIRE, TO_WIRE
from rolemesh.v1.data_pb2 import Dtype
from rolemesh.v1.weights_pb2 import WeightManifest, WeightSpec

ALIGNMENT = 64
MAX_REGION_BYTES = 1 << 42  # 4 TiB: a trillion parameters in float32


def aligned(offset: int) -> int:
    """The next multiple of 64 bytes."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """A contiguous tensor's memory, not copied."""
    array: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def checksum(data: NDArray[np.uint8]) -> int:
    """xxh3, 64 bits."""
    return xxhash.xxh3_64_intdigest(data.data)


def weight_spec(name: str, tensor: Tensor, offset: int) -> WeightSpec:
    """Describes a contiguous CPU tensor that lies at an offset of the region."""
    data = tensor_bytes(tensor)
    return WeightSpec(
        name=name,
        dtype=Dtype.Name(TO_WIRE[tensor.dtype]),
        shape=tensor.shape,
        offset=offset,
        num_bytes=len(data),
        checksum=checksum(data),
    )


def check_manifest(manifest: WeightManifest, version: int) -> None:
    """Before any memory is taken for it.

    Raises:
        WeightsUnavailable: another version; a dtype unknown; a name twice; sizes, offsets and region that do
            not agree.
    """
    if manifest.version != version:
        raise WeightsUnavailable(f"asked for weights version {version}, got the manifest of {manifest.version}")
    names, end = set(), 0
    for spec in manifest.weights:
        where = f"weights version {version}, {spec.name!r}"
        if spec.name in names:
            raise WeightsUnavailable(f"{where}: listed twice")
        names.add(spec.name)
        if spec.dtype not in FROM_WIRE:
            raise WeightsUnavailable(f"{where}: unknown dtype {spec.dtype}")
        expected = math.prod(spec.shape) * FROM_WIRE[spec.dtype].itemsize
        if spec.num_bytes != expected:
            raise WeightsUnavailable(f"{where}: shape and dtype make {expected} bytes, not {spec.num_bytes}")
        if spec.offset != aligned(end):
            raise WeightsUnavailable(f"{where}: expected at byte {aligned(end)}, not {spec.offset}")
        end = spec.offset + spec.num_bytes
    if manifest.region_bytes != end or end > MAX_REGION_BYTES:
        raise WeightsUnavailable(
            f"weights version {version}: the tensors end at byte {end}, the region at {manifest.region_bytes}, "
            f"and {MAX_REGION_BYTES} is the limit"
        )


def unpack(manifest: WeightManifest, region: Tensor) -> dict[str, Tensor]:
    """The tensors, as views of a uint8 region."""
    return {
        spec.name: region[spec.offset : spec.offset + spec.num_bytes]
        .view(FROM_WIRE[spec.dtype])
        .reshape(tuple(spec.shape))
        for spec in manifest.weights
    }
