"""A version's region, byte by byte, and what a manifest may not claim."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.wire.hostile_messages import field
from rolemesh.errors import WeightsUnavailable
from rolemesh.services.rollout.engines.fitting import check_fit
from rolemesh.v1.weights_pb2 import WeightManifest
from rolemesh.weights import manifest as manifest_module
from rolemesh.weights.manifest import check_manifest, digest_of, outline, read_manifest, unpack
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.staging import BUFFER_BYTES, Staging, Writers, load
from rolemesh.wire.limits import MAX_WEIGHT_AXES, MAX_WEIGHTS

MIB = 1 << 20


def three_tensors() -> dict[str, Tensor]:
    return {
        "a": torch.arange(5, dtype=torch.int16),  # 10 bytes at 0
        "b": torch.arange(6, dtype=torch.float64).view(2, 3).T,  # 48 bytes at 64, not contiguous
        "c": torch.tensor(7, dtype=torch.uint8),  # 1 byte at 128, no axis
    }


def whole(held: PublishedWeights) -> bytes:
    return bytes(held.holding.region.read(0, held.holding.num_bytes))


def test_tensors_lie_at_multiples_of_64_in_order():
    manifest = PublishedWeights(4, three_tensors()).holding.manifest
    assert manifest.version == 4
    assert [(w.name, list(w.shape), w.offset, w.num_bytes) for w in manifest.weights] == [
        ("a", [5], 0, 10),
        ("b", [3, 2], 64, 48),
        ("c", [], 128, 1),
    ]
    assert manifest.region_bytes == 129
    check_manifest(manifest, 4)


def test_the_region_holds_the_tensors_and_zeros_between_them():
    held = PublishedWeights(0, three_tensors())
    region = whole(held)
    assert region[:10] == bytes([0, 0, 1, 0, 2, 0, 3, 0, 4, 0])
    assert region[10:64] == bytes(54)
    assert region[112:] == bytes(16) + b"\x07"
    back = unpack(held.holding.manifest, torch.frombuffer(bytearray(region), dtype=torch.uint8))
    for name, tensor in three_tensors().items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


async def test_held_weights_stay_unchanged_when_the_model_learns_on():
    tensors = three_tensors()
    held = PublishedWeights(0, tensors)
    tensors["a"] += 1
    assert torch.equal((await held.fetch())["a"], three_tensors()["a"])


def test_a_version_in_another_dtype_has_each_sum_rounded_once():
    """With eight bits, 1 + 2^-8 alone is 1. The delta makes it 1 + 2^-7, which fits. A vector stays float32."""
    tensors = {
        "a": torch.tensor([[1 + 2**-8]]),
        "b": torch.tensor([[1 + 2**-8]]),
        "n": torch.tensor([[7]]),
        "v": torch.tensor([1 + 2**-8]),
    }
    held = PublishedWeights(3, tensors, {"b": lambda: torch.tensor([[2**-8]])}, dtype=torch.bfloat16)
    cast = {
        "a": torch.tensor([[1.0]]).bfloat16(),
        "b": torch.tensor([[1.0078125]]).bfloat16(),
        "n": torch.tensor([[7]]),
        "v": torch.tensor([1 + 2**-8]),
    }
    assert held.holding.digest == PublishedWeights(3, cast).holding.digest


@pytest.mark.parametrize("buffer_bytes", [1, 7, 64, 1000])
def test_staging_writes_every_byte_once_at_its_place(buffer_bytes: int):
    """Parts of many sizes, none of them in order; some are larger than a buffer."""
    generator = torch.Generator().manual_seed(buffer_bytes)
    sizes = [0, 1, 6, 7, 8, 63, 64, 65, 200, 0, 3, 999]
    data = [torch.randint(1, 256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    region, counts = torch.zeros(sum(sizes), dtype=torch.uint8), torch.zeros(sum(sizes), dtype=torch.int64)

    def write(at: int, part: Tensor) -> None:
        region[at : at + len(part)] = part
        counts[at : at + len(part)] += 1

    writers = Writers(write)
    staging = Staging(writers, torch.device("cpu"), buffer_bytes)
    for number in torch.randperm(len(sizes), generator=generator).tolist():
        staging.put(starts[number], data[number])
    staging.finish()
    writers.close()
    assert torch.equal(region, torch.cat(data))
    assert (counts == 1).all()


@pytest.mark.parametrize("buffer_bytes", [8, 100, 1000])
def test_loading_copies_each_tensor_in_the_dtype_of_its_place(buffer_bytes: int):
    """Of many sizes: some are larger than both buffers, some share one; one does not lie in rows."""
    theirs = {str(size): torch.randn(size) for size in (0, 1, 2, 24, 25, 250, 999, 3)}
    theirs |= {"ids": torch.arange(7), "scalar": torch.tensor(5.0), "matrix": torch.randn(3, 4)}
    own = {name: torch.zeros_like(tensor) for name, tensor in theirs.items()}
    own |= {"250": torch.zeros(250).bfloat16(), "matrix": torch.zeros(4, 3).T, "other": torch.ones(2)}
    load(theirs, own, torch.device("cpu"), buffer_bytes)
    assert torch.equal(own.pop("other"), torch.ones(2))
    assert own["250"].dtype == torch.bfloat16
    assert all(torch.equal(tensor, theirs[name].to(tensor.dtype)) for name, tensor in own.items())


@pytest.mark.gpu
async def test_a_version_of_gpu_tensors_equals_the_cpus_and_comes_back():
    """More bytes than both buffers; bases are cast after their delta was added."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"a": 3 * BUFFER_BYTES // 4 + 5, "b": 1000, "c": BUFFER_BYTES, "d": 1, "e": BUFFER_BYTES // 8}
    tensors = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    for dtype in (None, torch.bfloat16):
        theirs = PublishedWeights(1, on_gpu, {"b": lambda: torch.ones(1000).cuda()}, dtype=dtype).holding
        mine = PublishedWeights(1, tensors, {"b": lambda: torch.ones(1000)}, dtype=dtype).holding
        assert theirs.digest == mine.digest
    came = {name: torch.zeros_like(tensor) for name, tensor in on_gpu.items()}
    load(await PublishedWeights(1, on_gpu).fetch(), came, torch.device("cuda"))
    assert all(torch.equal(tensor, on_gpu[name]) for name, tensor in came.items())


def test_float32_fits_a_smaller_engine_dtype_but_not_vice_versa():
    single, half = (
        {"a": torch.zeros(2, dtype=dtype, device="meta")} for dtype in (torch.float32, torch.bfloat16)
    )
    check_fit(1, single, half)
    check_fit(1, half, half)
    with pytest.raises(WeightsUnavailable, match=r"a is \[2\] torch.bfloat16, not \[2\] torch.float32"):
        check_fit(1, half, single)


def test_a_digest_names_version_and_every_bit():
    digests = {PublishedWeights(version, three_tensors()).holding.digest for version in (1, 1, 2)}
    other = three_tensors() | {"c": torch.tensor(8, dtype=torch.uint8)}
    assert len(digests) == 2
    assert PublishedWeights(1, other).holding.digest not in digests


def test_pieces_are_verified_in_order_up_to_the_first_bad_one():
    held = PublishedWeights(0, {"a": torch.arange(10 * MIB, dtype=torch.uint8)}).holding
    assert len(held.manifest.piece_checksums) == 3
    held.num_verified = 0
    assert [held.verified_until(end) for end in (4 * MIB - 1, 4 * MIB, 9 * MIB, 10 * MIB)] == [
        0,
        4 * MIB,
        8 * MIB,
        10 * MIB,
    ]
    held.manifest.piece_checksums[1] += 1
    assert held.verified_until(10 * MIB) == 4 * MIB


def test_no_tensors_and_empty_tensors_are_versions_too():
    assert whole(PublishedWeights(0, {})) == b""
    held = PublishedWeights(0, {"a": torch.zeros(0, 3), "b": torch.ones(1), "c": torch.zeros(0)})
    check_manifest(held.holding.manifest, 0)
    back = unpack(held.holding.manifest, torch.frombuffer(bytearray(whole(held)), dtype=torch.uint8))
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
        (lambda m: m.weights[1].shape.append(1 << 63), "a shape of 3 axes that no tensor has"),
        (lambda m: m.weights[1].shape.extend([0, 1 << 62, 2]), "a shape of 5 axes that no tensor has"),
        (lambda m: m.weights[1].shape.extend([1] * 63), "a shape of 65 axes that no tensor has"),
        (lambda m: setattr(m, "piece_bytes", 0), "pieces of 0 bytes"),
        (lambda m: setattr(m, "piece_bytes", 1 << 40), "pieces of 1099511627776 bytes"),
        (lambda m: m.piece_checksums.append(0), "2 checksums, 1 pieces"),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(lie: Callable[[WeightManifest], None], message: str):
    manifest = PublishedWeights(4, three_tensors()).holding.manifest
    lie(manifest)
    data = manifest.SerializeToString()
    with pytest.raises(WeightsUnavailable, match=message):
        read_manifest(data, 4, digest_of(data))


def test_a_manifest_of_another_digest_or_none_at_all_is_refused():
    data = PublishedWeights(4, three_tensors()).holding.serialized
    with pytest.raises(WeightsUnavailable, match="another digest"):
        read_manifest(data, 4, digest_of(data + b" "))
    huge = bytes((16 << 20) + 1)
    with pytest.raises(WeightsUnavailable, match="a manifest of 16777217 bytes"):
        read_manifest(huge, 4, digest_of(huge))
    with pytest.raises(WeightsUnavailable, match="ends within a number"):
        read_manifest(b"\xff", 4, digest_of(b"\xff"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x12\x00" * (8 << 20), "a manifest of more than 65544 fields"),
        (field(2, field(15, b"") * 9), "a tensor's description of more than 8 fields"),
        (field(2, field(3, b"\x01" * 641)), "a shape of 641 bytes; a tensor has at most 64 axes"),
        (field(2, field(3, b"\x01" * 320) * 3), "a shape of 960 bytes"),
    ],
    ids=["8 M tensors", "fields", "axes", "axes in parts"],
)
def test_a_manifest_of_too_many_parts_is_refused_before_parsing(
    data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delattr(manifest_module, "WeightManifest")  # what would parse it
    with pytest.raises(WeightsUnavailable, match=message):
        read_manifest(data, 4, digest_of(data))


def test_a_manifest_at_the_limits_of_tensors_and_axes_is_read():
    manifest = WeightManifest(version=4, piece_bytes=1 << 22)
    for number in range(MAX_WEIGHTS):
        axes = [0] * MAX_WEIGHT_AXES if number < 3 else [0]
        manifest.weights.add(name=f"layer.{number}", dtype="DTYPE_FLOAT32", shape=axes)
    data = manifest.SerializeToString()
    described = outline(read_manifest(data, 4, digest_of(data)))
    assert len(described) == MAX_WEIGHTS
    assert described["layer.2"].shape == (0,) * MAX_WEIGHT_AXES


def test_a_manifest_larger_than_any_model_is_refused():
    manifest = WeightManifest(version=1, region_bytes=1 << 43)
    manifest.weights.add(name="a", dtype="DTYPE_UINT8", shape=[1 << 43], num_bytes=1 << 43)
    with pytest.raises(WeightsUnavailable, match="is the limit"):
        check_manifest(manifest, 1)
