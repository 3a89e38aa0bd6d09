"""Weights pulled over real servers, from actor or relay: every bit arrives, or what is missing is named."""

import asyncio

import pytest
import torch
from weight_holders import (
    MIB,
    Elsewhere,
    Faulty,
    Flipping,
    Gated,
    assert_same,
    counted,
    large,
    noise,
    of_every_dtype,
    pull,
    serving,
    stored,
)

from rolemesh.errors import WeightsUnavailable
from rolemesh.telemetry import metrics
from rolemesh.v1.weights_pb2 import WatchRegionRequest
from rolemesh.weights import region, remote, service
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.weights.weight_version import WeightVersion

# ------------------------------------------------------------------------------- what arrives


@pytest.mark.parametrize("shared", [True, False])
async def test_every_bit_of_every_dtype_arrives(shared: bool, request: pytest.FixtureRequest):
    if not shared:
        request.getfixturevalue("no_shared_memory")
    held = PublishedWeights(7, {**of_every_dtype(), "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)})
    async with serving(WeightsServicer(stored(held))) as addresses:
        source = pull(addresses, held)
        assert source.version == 7
        tensors = await source.fetch()
    await assert_same(tensors, held)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())


@pytest.mark.parametrize("shared", [True, False])
async def test_a_version_of_several_pieces_counts_each_byte_once(shared: bool, request: pytest.FixtureRequest):
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
    held = PublishedWeights(1, {"empty": torch.zeros(0, 4)})
    async with serving(WeightsServicer(stored(held))) as addresses:
        await assert_same(await pull(addresses, held).fetch(), held)


async def test_a_version_that_the_process_holds_is_taken_by_reference():
    held = large()
    tensors = await pull(["127.0.0.1:1"], held, stored(held)).fetch()
    assert tensors["b"].data_ptr() == (await held.fetch())["b"].data_ptr()


# -------------------------------------------------------------------------- what is not there


async def test_a_missing_version_error_names_the_held_one():
    wanted = large(1)
    for store, message in [
        (stored(large(2)), "version 1 is not held here; version 2 is held"),
        (WeightStore(), "none is held"),
        (stored(PublishedWeights(1, {"a": noise(9)})), "version 1 is held, of another digest"),
    ]:
        async with serving(WeightsServicer(store)) as addresses:
            with pytest.raises(WeightsUnavailable, match=f"from {addresses[0]}.*{message}"):
                await pull(addresses, wanted).fetch()


async def test_weights_of_another_digest_are_refused_from_any_holder():
    class Careless(WeightStore):
        async def get(self, version: int, digest: str, wait_s: float = 0.0) -> WeightVersion:
            held = self._held
            assert held is not None
            return held

    wanted, careless = large(1), Careless()
    careless.put(PublishedWeights(1, {"a": noise(9)}).holding)
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
        with pytest.raises(WeightsUnavailable, match="version 1 is no longer held: version 2 is held"):
            await fetching


async def test_every_source_is_named_with_what_it_did(no_shared_memory: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remote, "STALL_S", 2.0)
    monkeypatch.setattr(remote, "PATIENCE_S", 4.0)
    held = large()
    async with serving(WeightsServicer(WeightStore())) as gone:
        pass
    bad = [Flipping(held, 5 * MIB, times=9), Gated(held, 0), WeightsServicer(stored(large(2)))]
    async with serving(*bad) as addresses:
        with pytest.raises(WeightsUnavailable) as raised:
            await pull([*gone, *addresses], held).fetch()
    said = [
        "UNAVAILABLE",
        "piece at byte 4194304 arrived damaged twice",
        "fewer than 4194304 bytes were verified in 2 s",
        "version 2 is held",
    ]
    have, *reasons = str(raised.value).split("; from ")
    assert "beyond byte 4194304 of" in have
    for line, address, what in zip(reasons, [*gone, *addresses], said, strict=True):
        assert line.startswith(address)
        assert what in line


async def test_a_pull_ends_by_its_deadline_and_the_next_resumes_it(no_shared_memory: None):
    held, store = large(), WeightStore()
    gated = Gated(held, 9 * MIB)
    async with serving(gated) as addresses:
        with pytest.raises(WeightsUnavailable, match=r"beyond byte 8388608 of 25165\d+ within 4 s"):
            await pull(addresses, held, store, timeout_s=4).fetch()
        gated.open.set()
        await assert_same(await pull(addresses, held, store).fetch(), held)
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


async def test_a_receiver_waits_for_a_relay_that_has_no_version_yet(no_shared_memory: None):
    asked = asyncio.Event()

    class Asked(WeightStore):
        async def get(self, version: int, digest: str, wait_s: float = 0.0) -> WeightVersion:
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


async def pulled_along_a_chain(
    actor: str, relays: list[str], held: PublishedWeights, stores: list[WeightStore]
) -> None:
    """Each relay pulls from the one before it, or else from one further back, the first from the actor."""
    chain = [[*reversed(relays[:i]), actor] for i in range(len(stores))]
    pulls = [pull(sources, held, store).fetch() for sources, store in zip(chain, stores, strict=True)]
    for tensors in await asyncio.gather(*pulls):
        await assert_same(tensors, held)


async def test_the_actor_sends_each_byte_once_for_any_replica_count(
    no_shared_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RELAY_WAIT_S", 60.0)  # each relay learns of the version
    held, stores = large(), [WeightStore() for _ in range(8)]
    sent, relayed = (counted(metrics.WEIGHTS_SENT_BYTES, role) for role in ("actor", "rollout"))
    async with serving(WeightsServicer(stored(held)), *map(WeightsServicer, stores)) as (actor, *relays):
        await pulled_along_a_chain(actor, relays, held, stores)
    assert sent() == held.holding.num_bytes
    assert relayed() == 7 * held.holding.num_bytes


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_replicas_of_one_machine_share_one_received_region():
    """The actor is on another machine; of eight replicas here one receives, and all have the same pages."""
    held, stores = large(), [WeightStore() for _ in range(8)]
    elsewhere = Elsewhere(held, held.holding.num_bytes)
    async with serving(elsewhere, *map(WeightsServicer, stores)) as (actor, *relays):
        await pulled_along_a_chain(actor, relays, held, stores)
    assert elsewhere.starts == [0]
    taken = [store.find(1, held.holding.digest) for store in stores]
    names = {holding.region.shared.name for holding in taken if holding and holding.region.shared}
    assert len(names) == 1
    assert all(holding and holding.region.is_sealed for holding in taken)


def unverified(held: PublishedWeights) -> WeightVersion:
    """All bytes are there, and none counts yet."""
    whole = held.holding
    arriving = WeightVersion(whole.serialized, whole.manifest, WeightRegion(whole.num_bytes), "rollout")
    arriving.region.write(0, whole.region.read(0, whole.num_bytes))
    return arriving


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_a_local_relay_reports_progress_every_least_bytes():
    """Else one that brings just what a receiver wants in STALL_S would be left as stalled."""
    assert service.WATCH_BYTES <= remote.LEAST_BYTES
    held, relay, last = large(), WeightStore(), WeightStore()
    whole, arriving = held.holding, unverified(held)
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


async def test_bytes_verified_during_an_answer_are_in_the_next_one():
    """The servicer is asked without a channel: how long an answer is on its way is here for the test to say."""
    held, store = large(), WeightStore()
    arriving = unverified(held)
    store.put(arriving)
    wanted = WatchRegionRequest(version=1, digest=held.holding.digest)
    answers = WeightsServicer(store).WatchRegion(wanted, None)
    assert (await anext(answers)).num_verified == 0
    for reached in (2 * service.WATCH_BYTES, 3 * service.WATCH_BYTES):
        arriving.advance(reached)
        async with asyncio.timeout(120):
            assert (await anext(answers)).num_verified == reached


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_a_dead_relay_costs_its_readers_nothing_verified():
    """They map its memory."""
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
