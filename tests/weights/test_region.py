"""The memory of a version: mapped by other processes, sealed, and released with its last reader."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from full_disk import files_of_at_most

from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import SharedRegion
from rolemesh.weights import region as region_module
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import CAN_SHARE, WeightRegion
from rolemesh.weights.store import WeightStore
from rolemesh.weights.tensors import RegionTensors

MIB = 1 << 20
shares = pytest.mark.skipif(not CAN_SHARE, reason="sealed memory is Linux's")


def num_mapped() -> int:
    """Regions that are mapped into this process."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:rolemesh-weights")


@shares
async def test_another_process_maps_a_version_and_copies_no_byte():
    held = await PublishedWeights(1, {"a": torch.arange(MIB), "b": torch.ones(3).bfloat16()}).fetch()
    before = num_mapped()
    mapped = RegionTensors.at(held.place)
    assert num_mapped() == before + 1
    assert [mapped.keys(), mapped["b"].dtype] == [held.keys(), torch.bfloat16]
    assert all(torch.equal(mapped[name], tensor) for name, tensor in held.items())
    assert mapped.region.shared is not None
    assert held.region.shared is not None
    assert os.stat(mapped.region.shared.path).st_ino == os.stat(held.region.shared.path).st_ino
    unsealed = RegionTensors(held.manifest, WeightRegion(held.manifest.region_bytes))
    with pytest.raises(WeightsUnavailable, match="version 1 cannot be mapped from /proc/"):
        RegionTensors.at(unsealed.place)


@shares
def test_another_mapping_has_the_same_bytes_and_is_read_only():
    """Neither mapping can change the bytes."""
    region = WeightRegion(2 * MIB)
    region.write(5, memoryview(b"weights"))
    shared = region.shared
    assert shared is not None
    other = WeightRegion.open(shared, 2 * MIB)
    assert other is not None
    assert bytes(other.read(4, 13)) == b"\0weights\0"
    region.write(5, memoryview(b"W"))
    assert bytes(other.read(5, 6)) == b"W"  # it is the same memory, not a copy
    assert not other.is_sealed
    region.seal()
    assert other.is_sealed
    with pytest.raises(PermissionError):
        region.write(5, memoryview(b"w"))
    other.tensor()[5] = 0  # a mistake of the reader's damages the reader's alone
    assert bytes(region.read(5, 6)) == b"W"
    with pytest.raises(PermissionError):
        os.truncate(shared.path, 0)


@shares
@pytest.mark.parametrize("way", ["by a mapping", "on an old kernel", "with few CPUs"])
def test_threads_fill_a_region_which_can_be_sealed_at_once(way: str, monkeypatch: pytest.MonkeyPatch):
    """Parts begin and end within pages. A kernel before 5.14 does not know the advice that makes pages."""
    monkeypatch.setattr(region_module, "MAPPING_THREADS", 99 if way == "with few CPUs" else 1)
    if way == "on an old kernel":
        monkeypatch.setattr(region_module, "POPULATE_WRITE", -1)
    data = torch.randint(256, (MIB + 5,), dtype=torch.uint8).numpy().tobytes()
    region = WeightRegion(len(data))

    def fill(start: int) -> None:
        region.fill(start, memoryview(data)[start : start + 30_001])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(fill, range(0, len(data), 30_001)))
        region.seal()
    assert bytes(region.read(0, len(data))) == data
    with pytest.raises(PermissionError):
        fill(0)


@shares
def test_memory_outlives_its_maker_and_ends_with_its_last_reader():
    before = num_mapped()
    region = WeightRegion(MIB)
    region.write(0, memoryview(b"weights"))
    shared = region.shared
    assert shared is not None
    other = WeightRegion.open(shared, MIB)
    assert other is not None
    assert num_mapped() == before + 2
    del region
    assert bytes(other.read(0, 7)) == b"weights"
    assert num_mapped() == before + 1
    del other
    assert num_mapped() == before


@shares
def test_only_exactly_that_region_is_opened(tmp_path: Path):
    region = WeightRegion(MIB)
    shared = region.shared
    assert shared is not None
    ordinary = tmp_path / "file"
    ordinary.write_bytes(bytes(MIB))
    with ordinary.open("rb") as file:
        fd = file.fileno()
        ours = f"/proc/{os.getpid()}/fd"
        for path, name, num_bytes in [
            (shared.path, f"{shared.name[:-1]}?", MIB),
            (shared.path, shared.name, MIB + 1),
            (f"{ours}/99999", shared.name, MIB),
            (f"{ours}/{fd}", str(ordinary), MIB),  # it could be changed or cut short at any time
            (str(ordinary), str(ordinary), MIB),
        ]:
            assert WeightRegion.open(SharedRegion(path=path, name=name), num_bytes) is None
        assert WeightRegion.open(shared, MIB) is not None


@shares
def test_no_two_regions_have_the_same_name():
    """Another machine's path may well be one of ours, with a region of the same size at it."""
    regions = [WeightRegion(MIB) for _ in range(3)]
    assert len({region.shared.name for region in regions if region.shared}) == 3


@shares
def test_memory_too_large_for_a_shared_file_is_private():
    with files_of_at_most(MIB):
        held = PublishedWeights(1, {"a": torch.arange(MIB)})
    region = held.holding.region
    assert (region.shared, region.is_sealed) == (None, False)
    assert held.holding.verified_until(region.num_bytes) == region.num_bytes
    tensors = held.holding.tensors()
    assert torch.equal(tensors["a"], torch.arange(MIB))
    with pytest.raises(WeightsUnavailable, match="private memory"):
        _ = tensors.place


@shares
def test_memory_is_taken_for_written_not_for_announced_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(region_module, "MAPPING_THREADS", 1)
    region = WeightRegion(1 << 31)
    region.write(1 << 30, memoryview(bytes(MIB)))
    region.fill(1 << 29, memoryview(bytes(MIB)))
    shared = region.shared
    assert shared is not None
    assert os.stat(shared.path).st_blocks * 512 == 2 * MIB
    promises_all = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1"  # as Kubernetes' nodes do
    with pytest.raises(WeightsUnavailable, match=r"no memory for \d+ bytes"):
        WeightRegion(1 << (60 if promises_all else 42))
    assert WeightRegion(1 << 42, is_filled=False).num_bytes == 1 << 42


async def test_a_store_drops_the_previous_version_even_if_it_is_read():
    before = num_mapped()
    store = WeightStore()
    first, second = (PublishedWeights(version, {"a": torch.zeros(MIB)}).holding for version in (1, 2))
    store.put(first)
    assert await store.get(1, first.digest) is first
    store.put(second)
    assert num_mapped() == before + 1
    with pytest.raises(WeightsUnavailable, match="version 1 is no longer held: version 2 is held"):
        await first.beyond(0)
    with pytest.raises(WeightsUnavailable, match="version 1 is not held here; version 2 is held"):
        await store.get(1, first.digest)
    with pytest.raises(WeightsUnavailable, match="version 2 is held, of another digest"):
        await store.get(2, first.digest)
