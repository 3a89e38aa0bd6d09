"""Weights pulled over real servers: every bit arrives, and what goes wrong is repaired or named."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.hostile_messages import field
from rolemesh import metrics
from rolemesh.errors import RoleUnavailable, WeightsUnavailable
from rolemesh.rpc.contract import WEIGHTS
from rolemesh.rpc.dtypes import TO_WIRE
from rolemesh.rpc.frame import join_frame
from rolemesh.rpc.server import RoleServer
from rolemesh.v1.weights_pb2 import GetManifestResponse, WatchRegionResponse
from rolemesh.weights import manifest, region, remote, service
from rolemesh.weights.held import HeldWeights, Holding
from rolemesh.weights.region import Region
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore

MIB = 1 << 20


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that has none, and as between two machines: every byte goes over the network."""
    monkeypatch.setattr(region, "CAN_SHARE", False)


@asynccontextmanager
async def serving(*servicers: WeightsServicer) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(_server(servicer)) for servicer in servicers]


@asynccontextmanager
async def _server(servicer: WeightsServicer, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = RoleServer({"actor": [WEIGHTS]})
    address = await server.start(listen)
    await server.ready({WEIGHTS: servicer})
    try:
        yield address
    finally:
        await server.drain(0)


def stored(held: HeldWeights) -> WeightStore:
    store = WeightStore()
    store.put(held.holding)
    return store


def of_every_dtype() -> dict[str, Tensor]:
    """Random bits, so NaNs of all kinds too; bool takes 0 and 1 alone."""
    octets = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return {
        str(dtype): (octets % 2).bool() if dtype == torch.bool else octets.clone().view(dtype)
        for dtype in TO_WIRE
    }


def noise(num_bytes: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def large(version: int = 1) -> HeldWeights:
    """Six pieces and a bit."""
    return HeldWeights(version, {"a": noise(10 * MIB + 5), "b": noise(14 * MIB)})


async def assert_same(tensors: dict[str, Tensor], held: HeldWeights) -> None:
    expected = await held.fetch()
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(tensors[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def pull(
    sources: Sequence[str], held: HeldWeights, store: WeightStore | None = None, **arguments: Any
) -> RemoteWeights:
    return RemoteWeights(sources, held.version, held.holding.digest, store=store, **arguments)


def counted(counter: Any, *labels: str) -> Callable[[], int]:
    """How much a counter has grown since now."""
    value = counter.labels(*labels)._value
    before = value.get()
    return lambda: int(value.get() - before)


# ---------------------------------------------------------------------------- servers that fail


class Faulty(WeightsServicer):
    """The real service, in whose stream of bytes something happens. `starts` are the offsets asked for."""

    def __init__(self, held: HeldWeights) -> None:
        super().__init__(stored(held))
        self.starts: list[int] = []

    async def FetchRange(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.starts.append(request.offset)
        at = request.offset
        async for frame in super().FetchRange(request, context):
            yield await self.on_frame(at, frame)
            at += MIB

    async def on_frame(self, at: int, frame: bytes) -> bytes:
        return frame


class Flipping(Faulty):
    """Damages one byte of a frame, so many times."""

    def __init__(self, held: HeldWeights, at: int, times: int) -> None:
        super().__init__(held)
        self._at, self._times = at, times

    async def on_frame(self, at: int, frame: bytes) -> bytes:
        if at != self._at or not self._times:
            return frame
        self._times -= 1
        return frame[:-1] + bytes([frame[-1] ^ 1])


class Gated(Faulty):
    """Sends up to a byte, and the rest once it is let."""

    def __init__(self, held: HeldWeights, until: int) -> None:
        super().__init__(held)
        self.reached, self.open = asyncio.Event(), asyncio.Event()
        self._until = until

    async def on_frame(self, at: int, frame: bytes) -> bytes:
        if at >= self._until:
            self.reached.set()
            await self.open.wait()
        return frame


class Elsewhere(Gated):
    """The same on another machine: its memory cannot be had."""

    async def GetManifest(self, request: Any, context: Any) -> Any:
        answer = await super().GetManifest(request, context)
        answer.ClearField("shared")
        return answer


# ------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("shared", [True, False])
async def test_every_bit_of_every_dtype_arrives(shared: bool, request: pytest.FixtureRequest):
    if not shared:
        request.getfixturevalue("no_shared_memory")
    held = HeldWeights(7, {**of_every_dtype(), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)})
    async with serving(WeightsServicer(stored(held))) as addresses:
        source = pull(addresses, held)
        assert source.version == 7
        tensors = await source.fetch()
    await assert_same(tensors, held)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())


@pytest.mark.parametrize("shared", [True, False])
async def test_a_version_of_several_pieces_arrives_and_each_byte_is_counted_once(
    shared: bool, request: pytest.FixtureRequest
):
    if not shared:
        request.getfixturevalue("no_shared_memory")
    held = large()
    sent = counted(metrics.WEIGHTS_SENT_BYTES, "actor")
    received = counted(metrics.WEIGHTS_RECEIVED_BYTES, "memory" if shared else "actor")
    async with serving(WeightsServicer(stored(held))) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)
    assert received() == held.holding.num_bytes
    assert sent() == (0 if shared else held.holding.num_bytes)


async def test_a_version_without_bytes_arrives():
    held = HeldWeights(1, {"empty": torch.zeros(0, 4)})
    async with serving(WeightsServicer(stored(held))) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)


async def test_what_the_process_holds_already_is_taken_by_reference():
    held = large()
    tensors = await pull(["127.0.0.1:1"], held, stored(held)).fetch()
    assert tensors["b"].data_ptr() == (await held.fetch())["b"].data_ptr()


# -------------------------------------------------------------------------- what is not there


async def test_a_version_that_is_not_held_is_named_with_the_one_that_is():
    wanted = large(1)
    for store, message in [
        (stored(large(2)), "version 1 is not held here; version 2 is held"),
        (WeightStore(), "none is held"),
        (stored(HeldWeights(1, {"a": noise(9)})), "version 1 is held, of another digest"),
    ]:
        async with serving(WeightsServicer(store)) as addresses:
            with pytest.raises(WeightsUnavailable, match=f"from {addresses[0]}.*{message}"):
                await pull(addresses, wanted).fetch()


async def test_weights_of_another_digest_are_refused_also_from_a_holder_that_gives_them():
    class Careless(WeightStore):
        async def get(self, version: int, digest: str, wait_s: float = 0.0) -> Holding:
            held = self._held
            assert held is not None
            return held

    wanted, careless = large(1), Careless()
    careless.put(HeldWeights(1, {"a": noise(9)}).holding)
    async with serving(WeightsServicer(careless), WeightsServicer(stored(wanted))) as addresses:
        with pytest.raises(WeightsUnavailable, match="version 1 of another digest"):
            await pull(addresses[:1], wanted).fetch()
        await assert_same(await pull(addresses, wanted).fetch(), wanted)


async def test_a_version_that_goes_while_it_is_pulled_is_unavailable(no_shared_memory: None):
    held = large(1)
    gated = Gated(held, 6 * MIB)
    async with serving(gated) as addresses:
        fetching = asyncio.create_task(pull(addresses, held).fetch())
        await gated.reached.wait()
        gated._store.put(large(2).holding)
        gated.open.set()
        with pytest.raises(WeightsUnavailable, match="version 1 is held no longer: version 2 is held"):
            await fetching


async def test_every_source_is_named_with_what_it_did(no_shared_memory: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "STALL_S", 2.0)
    monkeypatch.setattr(remote, "PATIENCE_S", 4.0)
    held = large()
    async with serving(WeightsServicer(WeightStore())) as gone:
        pass
    bad = [Flipping(held, at=5 * MIB, times=9), Gated(held, 0), WeightsServicer(stored(large(2)))]
    async with serving(*bad) as addresses:
        with pytest.raises(WeightsUnavailable) as raised:
            await pull([*gone, *addresses], held).fetch()
    said = [
        "UNAVAILABLE",
        "piece at byte 4194304, twice",
        "fewer than 4194304 bytes were verified in 2 s",
        "version 2 is held",
    ]
    have, *told = str(raised.value).split("; from ")
    assert "beyond byte 4194304 of" in have
    for line, address, what in zip(told, [*gone, *addresses], said, strict=True):
        assert line.startswith(address)
        assert what in line


async def test_a_pull_ends_by_its_deadline_and_the_next_goes_on_where_it_ended(no_shared_memory: None):
    held, store = large(), WeightStore()
    gated = Gated(held, 9 * MIB)
    async with serving(gated) as addresses:
        with pytest.raises(WeightsUnavailable, match=r"beyond byte 8388608 of 25165\d+ within 4 s"):
            await pull(addresses, held, store, timeout_s=4).fetch()
        gated.open.set()
        await assert_same(await pull(addresses, held, store).fetch(), held)
    assert gated.starts == [0, 8 * MIB]


# ---------------------------------------------------------------------------- what is repaired


async def test_a_damaged_piece_is_fetched_again_and_only_it(no_shared_memory: None):
    held = large()
    flipping = Flipping(held, at=9 * MIB, times=1)
    async with serving(flipping) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)
    assert flipping.starts == [0, 8 * MIB]


async def test_a_holder_whose_memory_has_changed_is_left_for_the_next(no_shared_memory: None):
    held, damaged = large(), large()
    assert damaged.holding.digest == held.holding.digest
    (await damaged.fetch())["b"][150] += 1
    good = Faulty(held)
    async with serving(WeightsServicer(stored(damaged)), good) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)
        with pytest.raises(WeightsUnavailable, match="the piece at byte 8388608, twice"):
            await pull(addresses[:1], held).fetch()
    assert good.starts == [8 * MIB]  # what was verified is kept


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_shared_memory_that_could_still_be_changed_is_not_used_though_it_is_said_to_be_whole(
    monkeypatch: pytest.MonkeyPatch,
):
    held = large()
    honest = held.holding
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(region, "CAN_SHARE", False)
        far = large()
        assert far.holding.digest == honest.digest
    lying = Region(honest.num_bytes)
    lying.write(0, honest.region.read(0, honest.num_bytes))
    store, pulled = WeightStore(), WeightStore()
    store.put(Holding(honest.serialized, honest.manifest, lying, "rollout", honest.num_bytes))
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
async def test_what_came_from_memory_that_was_never_sealed_is_verified_before_it_is_kept():
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

    def __init__(self, held: HeldWeights, num_bytes: int) -> None:
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
async def test_a_sender_that_trickles_is_left_for_the_next_and_does_not_last_to_the_deadline(
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


async def test_a_region_that_is_verified_too_slowly_by_its_holder_is_left_for_the_next(
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
    store.put(
        Holding(held.holding.serialized, held.holding.manifest, Region(held.holding.num_bytes), "rollout")
    )
    stalled = counted(metrics.WEIGHTS_SOURCE_FAILURES, "stalled")
    async with serving(Slow(store), Faulty(far)) as addresses:
        await assert_same(await pull(addresses, held, timeout_s=100).fetch(), held)
    assert stalled() == 1


@pytest.mark.parametrize(
    "junk", [b"\xff" * 40, b"\x7a\x00", field(1, b"") * 40], ids=["no frame", "empty", "many fields"]
)
async def test_a_sender_of_other_things_than_frames_is_left_for_the_next(junk: bytes, no_shared_memory: None):
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
            "a manifest of 16777217 bytes; 16777216 are accepted",
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


async def test_the_only_holder_stopped_in_mid_stream_and_started_again_is_resumed(no_shared_memory: None):
    held = large()
    gated = Gated(held, 9 * MIB)
    async with _server(gated) as address:
        fetching = asyncio.create_task(pull([address], held).fetch())
        await gated.reached.wait()
    gated.open.set()
    async with _server(gated, address):
        await assert_same(await fetching, held)
    assert gated.starts == [0, 8 * MIB]


# -------------------------------------------------------------------------------------- relays


async def test_a_relay_gives_on_what_it_has_verified_before_it_has_all(no_shared_memory: None):
    held, relay, last = large(), WeightStore(), WeightStore()
    gated = Gated(held, 13 * MIB)
    async with serving(gated, WeightsServicer(relay)) as (actor, first):
        fetching = [asyncio.create_task(pull([actor], held, relay).fetch())]
        fetching += [asyncio.create_task(pull([first, actor], held, last).fetch())]
        await gated.reached.wait()
        held_last = await last.get(1, held.holding.digest, 30)
        assert await held_last.beyond(11 * MIB) == 12 * MIB
        gated.open.set()
        for tensors in await asyncio.gather(*fetching):
            await assert_same(tensors, held)
    assert gated.starts == [0]


async def test_a_relay_that_is_not_told_yet_is_waited_for(no_shared_memory: None):
    asked = asyncio.Event()

    class Asked(WeightStore):
        async def get(self, version: int, digest: str, wait_s: float = 0.0) -> Holding:
            asked.set()
            return await super().get(version, digest, wait_s)

    held, relay = large(), Asked()
    relay.put(large(0).holding)
    served = Faulty(held)
    async with serving(served, WeightsServicer(relay)) as (actor, first):
        fetching = asyncio.create_task(pull([first, actor], held).fetch())
        await asked.wait()
        await pull([actor], held, relay).fetch()
        await assert_same(await fetching, held)
    assert served.starts == [0]


async def test_the_actor_sends_each_byte_once_however_many_replicas_there_are(no_shared_memory: None):
    held, stores = large(), [WeightStore() for _ in range(8)]
    sent, relayed = (counted(metrics.WEIGHTS_SENT_BYTES, role) for role in ("actor", "rollout"))
    async with serving(WeightsServicer(stored(held)), *map(WeightsServicer, stores)) as (actor, *relays):
        chain = [[*reversed(relays[:i]), actor] for i in range(8)]
        pulls = [pull(sources, held, store).fetch() for sources, store in zip(chain, stores, strict=True)]
        for tensors in await asyncio.gather(*pulls):
            await assert_same(tensors, held)
    assert sent() == held.holding.num_bytes
    assert relayed() == 7 * held.holding.num_bytes


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_replicas_of_one_machine_share_one_region_which_the_first_receives():
    """The actor is on another machine; of eight replicas here one receives, and all have the same pages."""
    held, stores = large(), [WeightStore() for _ in range(8)]
    elsewhere = Elsewhere(held, held.holding.num_bytes)
    async with serving(elsewhere, *map(WeightsServicer, stores)) as (actor, *relays):
        chain = [[*reversed(relays[:i]), actor] for i in range(8)]
        pulls = [pull(sources, held, store).fetch() for sources, store in zip(chain, stores, strict=True)]
        for tensors in await asyncio.gather(*pulls):
            await assert_same(tensors, held)
    assert elsewhere.starts == [0]
    taken = [store.find(1, held.holding.digest) for store in stores]
    names = {holding.region.shared.name for holding in taken if holding and holding.region.shared}
    assert len(names) == 1
    assert all(holding and holding.region.is_sealed for holding in taken)


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_a_relay_of_the_same_machine_says_at_each_of_the_least_bytes_how_far_it_is():
    """Else one that brings just what a receiver wants in STALL_S would be left as stalled."""
    assert service.WATCH_BYTES <= remote.LEAST_BYTES
    held, relay, last = large(), WeightStore(), WeightStore()
    whole = held.holding
    arriving = Holding(whole.serialized, whole.manifest, Region(whole.num_bytes), "rollout")
    arriving.region.write(0, whole.region.read(0, whole.num_bytes))
    relay.put(arriving)
    async with serving(WeightsServicer(relay)) as addresses:
        fetching = asyncio.create_task(pull(addresses, held, last).fetch())
        mapped = await last.get(1, held.holding.digest, 30)
        for reached in range(remote.LEAST_BYTES, whole.num_bytes, remote.LEAST_BYTES):
            arriving.advance(reached)
            assert await mapped.beyond(reached - 1) == reached
            assert not mapped.region.is_own
        arriving.advance(whole.num_bytes)
        await assert_same(await fetching, held)


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_a_relay_that_dies_while_others_map_its_memory_costs_them_nothing_verified():
    held, relay, last = large(), WeightStore(), WeightStore()

    gated = Elsewhere(held, 13 * MIB)
    async with serving(gated) as (actor,):
        async with serving(WeightsServicer(relay)) as (first,):
            relaying = asyncio.create_task(pull([actor], held, relay).fetch())
            fetching = asyncio.create_task(pull([first, actor], held, last).fetch())
            held_last = await last.get(1, held.holding.digest, 30)
            assert await held_last.beyond(11 * MIB) == 12 * MIB
            assert not held_last.region.is_own
            relaying.cancel()
        gated.open.set()
        await assert_same(await fetching, held)
        assert held_last.region.is_own
    assert gated.starts == [0, 12 * MIB]
