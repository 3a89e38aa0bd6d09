"""Senders of weights that damage, stall, trickle or disappear: another, or the same again, makes up for it."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from torch import Tensor
from weight_holders import (
    MIB,
    Elsewhere,
    Faulty,
    Flipping,
    Gated,
    assert_same,
    counted,
    large,
    pull,
    server_of,
    serving,
    stored,
)

from benchmarks.wire.hostile_messages import field
from rolemesh.errors import RoleUnavailable, WeightsUnavailable
from rolemesh.telemetry import metrics
from rolemesh.v1.weights_pb2 import GetManifestResponse, WatchRegionResponse
from rolemesh.weights import manifest, region, remote
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.weights.weight_version import WeightVersion
from rolemesh.wire.frame import join_frame

# ---------------------------------------------------------------------------- what is repaired


async def test_a_damaged_piece_is_fetched_again_and_only_it(no_shared_memory: None):
    held = large()
    flipping = Flipping(held, 9 * MIB, times=1)
    async with serving(flipping) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)
    assert flipping.starts == [0, 8 * MIB]


async def test_two_pieces_each_damaged_once_are_both_fetched_again(no_shared_memory: None):
    held = large()
    flipping = Flipping(held, MIB, 21 * MIB, times=1)  # far apart: a sender is ahead of what is verified
    async with serving(flipping) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)
    assert flipping.starts == [0, 0, 20 * MIB]


async def test_a_holder_whose_memory_has_changed_is_left_for_the_next(no_shared_memory: None):
    held, damaged = large(), large()
    assert damaged.holding.digest == held.holding.digest
    (await damaged.fetch())["b"][150] += 1
    good = Faulty(held)
    async with serving(WeightsServicer(stored(damaged)), good) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)
        with pytest.raises(WeightsUnavailable, match="the piece at byte 8388608 arrived damaged twice"):
            await pull(addresses[:1], held).fetch()
    assert good.starts == [8 * MIB]  # what was verified is kept


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_unsealed_shared_memory_is_not_used_even_if_called_whole(
    monkeypatch: pytest.MonkeyPatch,
):
    held = large()
    honest = held.holding
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(region, "CAN_SHARE", False)
        far = large()
        assert far.holding.digest == honest.digest
    lying = WeightRegion(honest.num_bytes)
    lying.write(0, honest.region.read(0, honest.num_bytes))
    store, pulled = WeightStore(), WeightStore()
    store.put(WeightVersion(honest.serialized, honest.manifest, lying, "rollout", honest.num_bytes))
    good = Faulty(far)
    async with serving(WeightsServicer(store), good) as addresses:
        await assert_same(await pull(addresses, held, pulled).fetch(), held)
        assert good.starts == [0]
        await assert_same(await pull(addresses[::-1], held).fetch(), held)
        assert good.starts == [0, 0]
    taken = pulled.find(1, honest.digest)
    assert taken is not None
    assert taken.region.is_sealed
    lying.write(9 * MIB, memoryview(bytes(MIB)))
    await assert_same(taken.tensors(), held)


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_bytes_of_unsealed_memory_are_verified_before_being_kept():
    """A relay's memory is damaged behind its back while it arrives, and then the relay is gone."""
    held, relay, last = large(), WeightStore(), WeightStore()
    gated = Elsewhere(held, 13 * MIB)
    async with serving(gated) as (actor,):
        async with serving(WeightsServicer(relay)) as (first,):
            relaying = asyncio.create_task(pull([actor], held, relay).fetch())
            fetching = asyncio.create_task(pull([first, actor], held, last).fetch())
            arriving = await last.get(1, held.holding.digest, 30)
            assert await arriving.beyond(11 * MIB) == 12 * MIB
            (await relay.get(1, held.holding.digest)).region.write(5 * MIB, memoryview(b"damage"))
            relaying.cancel()
        gated.open.set()
        await assert_same(await fetching, held)
    assert gated.starts == [0, 4 * MIB]


async def test_a_sender_that_stalls_is_left_for_the_next(
    no_shared_memory: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "STALL_S", 2.0)
    held = large()
    stalled, good = Gated(held, 5 * MIB), Faulty(held)
    failures = counted(metrics.WEIGHTS_SOURCE_FAILURES, "stalled")
    async with serving(stalled, good) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)
    assert good.starts == [4 * MIB]
    assert failures() == 1


class Trickling(Faulty):
    """Sends for ever, and never enough: so many bytes at a time, one time after another."""

    def __init__(self, held: PublishedWeights, num_bytes: int) -> None:
        super().__init__(held)
        self._num_bytes = num_bytes

    async def FetchRange(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.starts.append(request.offset)
        holding = await self._store.get(request.version, request.digest)
        for at in range(request.offset, holding.num_bytes, self._num_bytes):
            piece = holding.region.read(at, min(at + self._num_bytes, holding.num_bytes))
            yield join_frame(None, (piece,), len(piece))
            await asyncio.sleep(0.2)


class Cutting(Trickling):
    """The same in calls of their own, each of which it breaks off."""

    async def FetchRange(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        async for frame in super().FetchRange(request, context):
            yield frame
            raise RoleUnavailable("so far and no further")


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [(Trickling, 1), (Trickling, 1 << 16), (Cutting, 1 << 16)],
    ids=["a byte at a time", "a piece at a time", "a piece in each call"],
)
async def test_a_slow_sender_is_left_for_the_next_before_the_deadline(
    kind: type[Trickling], num_bytes: int, no_shared_memory: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "STALL_S", 1.0)
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    monkeypatch.setattr(manifest, "PIECE_BYTES", 1 << 16)
    held = large()
    async with serving(kind(held, num_bytes), Faulty(held)) as addresses:
        with pytest.raises(WeightsUnavailable, match=r"of 25165\d+; from") as raised:  # and not: within 100 s
            await pull(addresses[:1], held, timeout_s=100).fetch()
        assert ("fewer than 4194304 bytes" in str(raised.value)) == (kind is Trickling)
        await assert_same(await pull(addresses, held, timeout_s=100).fetch(), held)


async def test_a_region_verified_too_slowly_is_left_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
):
    """Another process's memory is used when it is sealed; until then its holder says how far it is."""

    class Slow(WeightsServicer):
        async def WatchRegion(self, request: Any, context: Any) -> AsyncIterator[WatchRegionResponse]:
            for num_verified in itertools.count(1):
                yield WatchRegionResponse(num_verified=num_verified)
                await asyncio.sleep(0.2)

    monkeypatch.setattr(remote, "STALL_S", 1.0)
    held, store = large(), WeightStore()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(region, "CAN_SHARE", False)
        far = large()
        assert far.holding.digest == held.holding.digest
    whole = held.holding
    store.put(WeightVersion(whole.serialized, whole.manifest, WeightRegion(whole.num_bytes), "rollout"))
    stalled = counted(metrics.WEIGHTS_SOURCE_FAILURES, "stalled")
    async with serving(Slow(store), Faulty(far)) as addresses:
        await assert_same(await pull(addresses, held, timeout_s=100).fetch(), held)
    assert stalled() == 1


@pytest.mark.parametrize(
    "junk", [b"\xff" * 40, b"\x7a\x00", field(1, b"") * 40], ids=["no frame", "empty", "many fields"]
)
async def test_a_sender_of_anything_but_frames_is_left_for_the_next(junk: bytes, no_shared_memory: None):
    class Babbling(Faulty):
        async def on_frame(self, at: int, frame: bytes) -> bytes:
            return junk if at == 9 * MIB else frame

    held = large()
    good = Faulty(held)
    async with serving(Babbling(held), good) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)
    assert good.starts == [8 * MIB]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda answer: answer.MergeFrom(GetManifestResponse(manifest=bytes(18 << 20))),
            "at most 17825792 bytes",
        ),
        (
            lambda answer: answer.MergeFrom(GetManifestResponse(manifest=bytes((16 << 20) + 1))),
            "a manifest of 16777217 bytes; at most 16777216 accepted",
        ),
    ],
    ids=["an answer too large", "a manifest too large"],
)
async def test_a_sender_of_a_manifest_without_end_is_left_for_the_next(spoil: Any, said: str):
    class Endless(WeightsServicer):
        async def GetManifest(self, request: Any, context: Any) -> Any:
            answer = await super().GetManifest(request, context)
            spoil(answer)
            return answer

    held = large()
    async with serving(Endless(stored(held)), WeightsServicer(stored(held))) as addresses:
        with pytest.raises(WeightsUnavailable, match=said):
            await pull(addresses[:1], held).fetch()
        await assert_same(await pull(addresses, held).fetch(), held)


@pytest.mark.parametrize("shared", [True, False])
async def test_weights_that_do_not_fit_are_not_asked_for(shared: bool, request: pytest.FixtureRequest):
    if not shared:
        request.getfixturevalue("no_shared_memory")
    held, store = large(), WeightStore()
    described: list[dict[str, list[int]]] = []

    def fits(tensors: Mapping[str, Tensor]) -> None:
        assert all(tensor.device.type == "meta" for tensor in tensors.values())
        described.append({name: list(tensor.shape) for name, tensor in tensors.items()})
        raise WeightsUnavailable("not of this model")

    class Watched(Faulty):
        async def WatchRegion(self, request: Any, context: Any) -> AsyncIterator[WatchRegionResponse]:
            self.starts.append(-1)
            async for answer in super().WatchRegion(request, context):
                yield answer

    watched = Watched(held)
    received = [counted(metrics.WEIGHTS_RECEIVED_BYTES, kind) for kind in ("actor", "rollout", "memory")]
    async with serving(watched) as addresses:
        with pytest.raises(WeightsUnavailable, match=f"from {addresses[0]}: not of this model"):
            await pull(addresses, held, store).fetch(fits)
    assert described
    assert all(each == {"a": [10 * MIB + 5], "b": [14 * MIB]} for each in described)
    assert watched.starts == []
    assert [count() for count in received] == [0, 0, 0]
    assert store.find(held.version, held.holding.digest) is None
    with pytest.raises(WeightsUnavailable, match=r"^not of this model"):  # nor used where they are held already
        await pull(addresses, held, stored(held)).fetch(fits)


async def test_a_sender_that_disappears_is_left_for_the_next(no_shared_memory: None):
    held = large()
    gated, good = Gated(held, 5 * MIB), Faulty(held)
    async with serving(good) as second:
        async with serving(gated) as first:
            fetching = asyncio.create_task(pull([*first, *second], held).fetch())
            await gated.reached.wait()
        await assert_same(await fetching, held)
    assert good.starts == [4 * MIB]


async def test_the_only_holder_restarted_in_mid_stream_is_resumed(no_shared_memory: None):
    held = large()
    gated = Gated(held, 9 * MIB)
    async with server_of(gated) as address:
        fetching = asyncio.create_task(pull([address], held).fetch())
        await gated.reached.wait()
    gated.open.set()
    async with server_of(gated, address):
        await assert_same(await fetching, held)
    assert gated.starts == [0, 8 * MIB]
