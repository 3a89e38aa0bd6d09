"""Writes, checks and reads the manifest of a version of the weights (WeightManifest of weights.proto)."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash
from google.protobuf.message import DecodeError
from torch import Tensor

from rolemesh.errors import InvalidBatch, WeightsUnavailable
from rolemesh.v1.data_pb2 import Dtype
from rolemesh.v1.weights_pb2 import WeightManifest, WeightSpec
from rolemesh.weights.region import num_threads
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
# A relay passes a piece on once it is whole. Pieces are small next to a model, large next to a call's overhead.
PIECE_BYTES = 4 << 20
MIN_PIECE_BYTES = 1 << 16
MAX_PIECE_BYTES = 1 << 26
# fields of WeightManifest and WeightSpec
_WEIGHTS = 2
_SHAPE = 3
MAX_VERSION = (1 << 63) - 1  # `weight_versions` of a response is int64
MAX_NUMBER_BYTES = 10  # of a varint
DIGEST = re.compile(r"[0-9a-f]{64}")


def aligned(offset: int) -> int:
    """The next multiple of 64 bytes."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def checksum(piece: memoryview) -> int:
    """64-bit xxh3 checksum of a piece."""
    return xxhash.xxh3_64_intdigest(piece)


def checksums(pieces: Iterable[memoryview]) -> list[int]:
    """Return the checksum of each piece. Threads compute them: xxhash releases the interpreter's lock."""
    with ThreadPoolExecutor(num_threads(), "checksums") as threads:
        return list(threads.map(checksum, pieces))


def digest_of(manifest: bytes) -> str:
    """SHA-256 of a serialized manifest, in hex."""
    return hashlib.sha256(manifest).hexdigest()


def name_of(version: int, digest: str) -> str:
    """Return `version@digest`, which identifies weights in metadata and comparisons."""
    return f"{version}@{digest}"


def check_version(version: int) -> None:
    """Raise InvalidBatch if the version does not fit a response's int64 column."""
    if version > MAX_VERSION:
        raise InvalidBatch(f"weights version {version}: versions are step numbers, at most {MAX_VERSION}")


def check_digest(digest: str) -> None:
    """Raise InvalidBatch unless the digest has the form that `digest_of` makes."""
    if not DIGEST.fullmatch(digest):
        raise InvalidBatch(f"{digest[:80]!r} is not a digest: expected 64 hexadecimal digits in lower case")


def lay_out(version: int, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> WeightManifest:
    """Place each tensor in the region, and return the manifest without the pieces' checksums.

    Floating-point tensors of two axes or more have `dtype` there, if it is given. Vectors have float32 then:
    they are few bytes, and an engine may hold one so (the router's bias of DeepSeek-V3).
    """
    manifest = WeightManifest(version=version, piece_bytes=PIECE_BYTES)
    end = 0
    for name, tensor in tensors.items():
        own = tensor.dtype
        if dtype is not None and tensor.is_floating_point():
            own = dtype if tensor.dim() > 1 else torch.promote_types(own, torch.float32)
        # whole, also if sharded
        offset = aligned(end)
        num_bytes = tensor.numel() * own.itemsize
        manifest.weights.append(
            WeightSpec(
                name=name,
                dtype=Dtype.Name(TO_WIRE[own]),
                shape=tensor.shape,
                offset=offset,
                num_bytes=num_bytes,
            )
        )
        end = offset + num_bytes
    manifest.region_bytes = end
    return manifest


def read_manifest(data: bytes, version: int, digest: str) -> WeightManifest:
    """Parse and check a received manifest, before allocating memory for the weights it describes.

    Raises:
        WeightsUnavailable: too large, or more parts than a model has; another digest or version; an unknown
            dtype; a duplicate name; sizes, offsets, pieces and region that are inconsistent.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsUnavailable(
            f"weights version {version}: a manifest of {len(data)} bytes; at most {MAX_MANIFEST_BYTES} accepted"
        )
    if (found := digest_of(data)) != digest:
        raise WeightsUnavailable(
            f"weights version {version} of another digest: expected {digest[:12]}, got {found[:12]}"
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
    """Raise InvalidBatch if a serialized manifest has more parts than any model's.

    A part can take as little as two bytes, and far more once parsed.
    """
    for number, wire_type, start, end in fields(data, MAX_WEIGHTS + MAX_WEIGHT_FIELDS, "a manifest"):
        if number != _WEIGHTS or wire_type != LENGTH_DELIMITED:
            continue
        shapes = [
            end - start
            for number, _, start, end in fields(data[start:end], MAX_WEIGHT_FIELDS, "a tensor's description")
            if number == _SHAPE
        ]
        if sum(shapes) > MAX_WEIGHT_AXES * MAX_NUMBER_BYTES:
            raise InvalidBatch(f"a shape of {sum(shapes)} bytes; a tensor has at most {MAX_WEIGHT_AXES} axes")


def check_manifest(manifest: WeightManifest, version: int) -> None:
    """Check a parsed manifest: raise WeightsUnavailable if its parts are invalid or inconsistent."""
    if manifest.version != version:
        raise WeightsUnavailable(f"asked for weights version {version}, got the manifest of {manifest.version}")
    names = set()
    end = 0
    for spec in manifest.weights:
        where = f"weights version {version}, {spec.name!r}"
        if spec.name in names:
            raise WeightsUnavailable(f"{where}: listed twice")
        names.add(spec.name)
        if spec.dtype not in FROM_WIRE:
            raise WeightsUnavailable(f"{where}: unknown dtype {spec.dtype}")
        # An empty tensor takes no bytes, but the product of its other axes must still fit in 64 bits.
        if len(spec.shape) > MAX_WEIGHT_AXES or math.prod(size or 1 for size in spec.shape) >= 1 << 63:
            raise WeightsUnavailable(
                f"{where}: a shape of {len(spec.shape)} axes that no tensor has; at most {MAX_WEIGHT_AXES} "
                "axes and fewer than 2^63 elements are accepted"
            )
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
    num_checksums = len(manifest.piece_checksums)
    num_pieces = -(-end // manifest.piece_bytes)
    if num_checksums != num_pieces:
        raise WeightsUnavailable(f"weights version {version}: {num_checksums} checksums, {num_pieces} pieces")


def outline(manifest: WeightManifest) -> dict[str, Tensor]:
    """Return a checked manifest's tensors on the device `meta`: names, shapes and dtypes."""
    return {
        spec.name: torch.empty(tuple(spec.shape), dtype=FROM_WIRE[spec.dtype], device="meta")
        for spec in manifest.weights
    }


def unpack(manifest: WeightManifest, region: Tensor) -> dict[str, Tensor]:
    """Return the tensors as views of a uint8 region."""
    return {
        spec.name: region[spec.offset : spec.offset + spec.num_bytes]
        .view(FROM_WIRE[spec.dtype])
        .reshape(tuple(spec.shape))
        for spec in manifest.weights
    }
