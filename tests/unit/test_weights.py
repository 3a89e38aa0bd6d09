"""A version's region, byte by byte, and what a manifest may not claim."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rolemesh.errors import InvalidBatch, WeightsUnavailable
from rolemesh.v1.weights_pb2 import WeightManifest
from rolemesh.weights.held import HeldWeights
from rolemesh.weights.manifest import check_manifest, unpack


def three_tensors() -> dict[str, Tensor]:
    return {
        "a": torch.arange(5, dtype=torch.int16),  # 10 bytes at 0
        "b": torch.arange(6, dtype=torch.float64).view(2, 3).T,  # 48 bytes at 64, not contiguous
        "c": torch.tensor(7, dtype=torch.uint8),  # 1 byte at 128, no axis
    }


def whole(held: HeldWeights, part_bytes: int = 1 << 20) -> bytes:
    return b"".join(held.read(0, held.manifest.region_bytes, part_bytes))


def test_tensors_lie_at_multiples_of_64_in_order():
    manifest = HeldWeights(4, three_tensors()).manifest
    assert manifest.version == 4
    assert [(w.name, list(w.shape), w.offset, w.num_bytes) for w in manifest.weights] == [
        ("a", [5], 0, 10),
        ("b", [3, 2], 64, 48),
        ("c", [], 128, 1),
    ]
    assert manifest.region_bytes == 129
    check_manifest(manifest, 4)


def test_the_region_holds_the_tensors_and_zeros_between_them():
    held = HeldWeights(0, three_tensors())
    region = whole(held)
    assert region[:10] == bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0])
    assert region[10:64] == bytes(54)
    assert region[112:] == bytes(16) + b"\x07"
    back = unpack(held.manifest, torch.frombuffer(bytearray(region), dtype=torch.uint8))
    for name, tensor in three_tensors().items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_any_range_in_any_parts_is_that_piece_of_the_region():
    held = HeldWeights(0, three_tensors())
    region = whole(held)
    for offset in range(0, 130, 3):
        for length in (0, 1, 7, 64, 129 - offset):
            if 0 <= length <= 129 - offset:
                parts = list(held.read(offset, length, part_bytes=10))
                assert b"".join(parts) == region[offset : offset + length]
                assert all(len(part) <= 10 for part in parts)


def test_a_range_beyond_the_region_is_refused():
    with pytest.raises(InvalidBatch, match="120 to 130 of a region of 129"):
        list(HeldWeights(0, three_tensors()).read(120, 10, 10))


def test_no_tensors_and_empty_tensors_are_versions_too():
    assert whole(HeldWeights(0, {})) == b""
    held = HeldWeights(0, {"a": torch.zeros(0, 3), "b": torch.ones(1), "c": torch.zeros(0)})
    check_manifest(held.manifest, 0)
    back = unpack(held.manifest, torch.frombuffer(bytearray(whole(held)), dtype=torch.uint8))
    assert [list(tensor.shape) for tensor in back.values()] == [[0, 3], [1], [0]]


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda m: setattr(m, "version", 5), "asked for weights version 4, got the manifest of 5"),
        (lambda m: setattr(m, "region_bytes", 1 << 40), "end at byte 129, the region at 1099511627776"),
        (lambda m: setattr(m.weights[1], "num_bytes", 49), "make 48 bytes, not 49"),
        (lambda m: setattr(m.weights[1], "offset", 0), "expected at byte 64, not 0"),
        (lambda m: setattr(m.weights[1], "name", "a"), "'a': listed twice"),
        (lambda m: setattr(m.weights[1], "dtype", 0), "unknown dtype 0"),
        (lambda m: setattr(m.weights[1], "dtype", 99), "unknown dtype 99"),
        (lambda m: m.weights[1].shape.append(1 << 63), "make 4"),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(lie: Callable[[WeightManifest], None], message: str):
    manifest = HeldWeights(4, three_tensors()).manifest
    lie(manifest)
    with pytest.raises(WeightsUnavailable, match=message):
        check_manifest(manifest, 4)


def test_a_manifest_larger_than_any_model_is_refused():
    manifest = WeightManifest(version=1, region_bytes=1 << 43)
    manifest.weights.add(name="a", dtype="DTYPE_UINT8", shape=[1 << 43], num_bytes=1 << 43)
    with pytest.raises(WeightsUnavailable, match="is the limit"):
        check_manifest(manifest, 1)
