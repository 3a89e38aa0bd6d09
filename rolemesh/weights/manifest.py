"""What a version of the weights consists of, byte by byte (WeightManifest of weights.proto)."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor

from rolemesh.errors import InvalidBatch, WeightsUnavailable
from rolemesh.v1.data_pb2 import Dtype
from rolemesh.v1.weights_pb2 import WeightManifest, WeightSpec
from rolemesh.wire.dtypes import FROM_WIRE, TO_WIRE
from rolemesh.wire.frame import LENGTH_DELIMITED, fields
from rolemesh.wire.limits import (
    MAX_MANIFEST_BYTES,
    MAX_WEIGHT_AXES,
    MAX_WEIGHT_FIELDS,
    MAX_WEIGHTS,
)

ALIGNMENT = 64
MAX_REGION_BYTES = 1 << 42  # 4 TiB: a trillion parameters in float32
# A relay gives on a piece once it is whole: small beside a model, large beside a call's overhead.
PIECE_BYTES = 4 << 20
MIN_PIECE_BYTES, MAX_PIECE_BYTES = 1 << 16, 1 << 26
_WEIGHTS, _SHAPE = 2, 3  # fields of WeightManifest and WeightSpec
MAX_VERSION = (1 << 63) - 1  # `weight_versions` of a response is int64
MAX_NUMBER_BYTES = 10  # of a varint
DIGEST = re.compile(r"[0-9a-f]{64}")


def aligned(offset: int) -> int:
    """The next multiple of 64 bytes."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """A contiguous CPU tensor's memory, not copied."""
    array: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return array


def checksum(piece: memoryview) -> int:
    """xxh3, 64 bits."""
    return xxhash.xxh3_64_intdigest(piece)


def digest_of(manifest: bytes) -> str:
    """SHA-256 of a serialized manifest, in hex."""
    return hashlib.sha256(manifest).hexdigest()


def name_of(version: int, digest: str) -> str:
    """A version and which one of that number, for metadata and comparison."""
    return f"{version}@{digest}"


def check_version(version: int) -> None:
    """Raises InvalidBatch where no response could name the version."""
    if version > MAX_VERSION:
        raise InvalidBatch(f"weights version {version}: versions are numbers of steps, at most {MAX_VERSION}")


def check_digest(digest: str) -> None:
    """Raises InvalidBatch unless it is what `digest_of` makes."""
    if not DIGEST.fullmatch(digest):
        raise InvalidBatch(f"{digest[:80]!r} is not a digest: 64 hexadecimal digits in lower case")


def lay_out(version: int, tensors: Mapping[str, Tensor]) -> WeightManifest:
    """Where each tensor lies in the region. The pieces' checksums are still to be filled in."""
    manifest, end = WeightManifest(version=version, piece_bytes=PIECE_BYTES), 0
    for name, tensor in tensors.items():
        offset = aligned(end)
        manifest.weights.append(
            WeightSpec(
                name=name,
                dtype=Dtype.Name(TO_WIRE[tensor.dtype]),
                shape=tensor.shape,
                offset=offset,
                num_bytes=tensor.nbytes,
            )
        )
        end = offset + tensor.nbytes
    manifest.region_bytes = end
    return manifest


def read_manifest(data: bytes, version: int, digest: str) -> WeightManifest:
    """A manifest as it came, checked before any memory is taken for what it describes.

    Raises:
        WeightsUnavailable: too large, or more parts than a model has; another digest or version; a dtype
            unknown; a name twice; sizes, offsets, pieces and region that do not agree.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsUnavailable(
            f"weights version {version}: a manifest of {len(data)} bytes; {MAX_MANIFEST_BYTES} are accepted"
        )
    if (found := digest_of(data)) != digest:
        raise WeightsUnavailable(
            f"weights version {version} of another digest: {found[:12]}, not {digest[:12]}"
        )
    try:
        _count(memoryview(data))
        manifest = WeightManifest.FromString(data)
    except InvalidBatch as error:
        raise WeightsUnavailable(f"weights version {version}: {error}") from error
    except DecodeError as error:
        raise WeightsUnavailable(f"weights version {version}: not a manifest") from error
    check_manifest(manifest, version)
    return manifest


def _count(data: memoryview) -> None:
    """Raises InvalidBatch where a serialized manifest has more parts than any model's: each takes two bytes,
    and far more once it is parsed."""
    for number, wire_type, start, end in fields(data, MAX_WEIGHTS + MAX_WEIGHT_FIELDS, "a manifest"):
        if number != _WEIGHTS or wire_type != LENGTH_DELIMITED:
            continue
        shapes = [
            end - start
            for number, _, start, end in fields(data[start:end], MAX_WEIGHT_FIELDS, "a tensor's description")
            if number == _SHAPE
        ]
        if sum(shapes) > MAX_WEIGHT_AXES * MAX_NUMBER_BYTES:
            raise InvalidBatch(f"a shape of {sum(shapes)} bytes; one has at most {MAX_WEIGHT_AXES} axes")


def check_manifest(manifest: WeightManifest, version: int) -> None:
    """Raises WeightsUnavailable where `read_manifest` does, but for the digest."""
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
        # An empty tensor's other axes take no bytes, and are to fit into 64 bits all the same.
        if len(spec.shape) > MAX_WEIGHT_AXES or math.prod(size or 1 for size in spec.shape) >= 1 << 63:
            raise WeightsUnavailable(f"{where}: a shape of {len(spec.shape)} axes that no tensor has")
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
    if not MIN_PIECE_BYTES <= manifest.piece_bytes <= MAX_PIECE_BYTES:
        raise WeightsUnavailable(
            f"weights version {version}: pieces of {manifest.piece_bytes} bytes; {MIN_PIECE_BYTES} to "
            f"{MAX_PIECE_BYTES} are accepted"
        )
    num_checksums, num_pieces = len(manifest.piece_checksums), -(-end // manifest.piece_bytes)
    if num_checksums != num_pieces:
        raise WeightsUnavailable(f"weights version {version}: {num_checksums} checksums, {num_pieces} pieces")


def outline(manifest: WeightManifest) -> dict[str, Tensor]:
    """Names, shapes and dtypes of a checked manifest's tensors, on the device `meta`."""
    return {
        spec.name: torch.empty(tuple(spec.shape), dtype=FROM_WIRE[spec.dtype], device="meta")
        for spec in manifest.weights
    }


def unpack(manifest: WeightManifest, region: Tensor) -> dict[str, Tensor]:
    """The tensors, as views of a uint8 region."""
    return {
        spec.name: region[spec.offset : spec.offset + spec.num_bytes]
        .view(FROM_WIRE[spec.dtype])
        .reshape(tuple(spec.shape))
        for spec in manifest.weights
    }
