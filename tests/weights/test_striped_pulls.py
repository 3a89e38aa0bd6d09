"""A version that several machines hold in stripes is pulled from all of them, and relayed as any other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, swap
from weight_holders import MIB, assert_same, counted, large, pull, server_of, serving

from rolemesh.errors import WeightsUnavailable
from rolemesh.ranks.rendezvous import Rendezvous
from rolemesh.rpc import tls
from rolemesh.rpc.channels import open_channel
from rolemesh.telemetry import metrics
from rolemesh.v1.weights_pb2 import FetchRangeRequest, StripedHolders, WatchRegionRequest
from rolemesh.v1.weights_pb2_grpc import WeightsServiceStub
from rolemesh.weights import remote
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.weights.stripe_server import StripeServer
from rolemesh.weights.stripes import HeldStripes, Stripes, stripes_of
from rolemesh.weights.weight_version import WeightVersion

STRIPE, PIECE = 8 * MIB, 4 * MIB  # 24 MiB and 5 bytes: four stripes


class Machine(WeightsServicer):
    """The real service of one machine. `starts` are the offsets that it was asked for."""

    def __init__(self) -> None:
        super().__init__(WeightStore())
        self.starts: list[int] = []
        self.flips: dict[int, int] = {}  # offset of a message, to how often it is damaged
        self.until = 1 << 60  # sends no byte from this offset on before `open` is set
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def FetchRange(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        self.starts.append(request.offset)
        at = request.offset
        async for frame in super().FetchRange(request, context):
            if at >= self.until:
                self.reached.set()
                await self.open.wait()
            if self.flips.get(at, 0):
                self.flips[at] -= 1
                frame = frame[:-1] + bytes([frame[-1] ^ 1])
            yield frame
            at += MIB


def divide(held: PublishedWeights, machines: Sequence[Machine], addresses: Sequence[str]) -> None:
    """Give each machine its stripes of a version, and no other byte."""
    whole, stripes = held.holding, Stripes(STRIPE, len(machines))
    for number, machine in enumerate(machines):
        region = WeightRegion(whole.num_bytes)
        for start, end in stripes.parts(number, 0, whole.num_bytes):
            region.write(start, whole.region.read(start, end))
        region.seal()
        part = HeldStripes(stripes, number, addresses)
        arriving = WeightVersion(whole.serialized, whole.manifest, region, "actor", whole.num_bytes, part)
        machine._store.put(arriving)


@asynccontextmanager
async def divided(held: PublishedWeights, *machines: Machine) -> AsyncIterator[str]:
    """Serve a version from several machines; yield the first one's address."""
    async with serving(*machines) as (first, *others):
        divide(held, machines, others)
        yield first


async def test_each_machine_sends_its_stripes_and_every_bit_arrives() -> None:
    held, machines = large(), [Machine() for _ in range(3)]
    sent = counted(metrics.WEIGHTS_SENT_BYTES, "actor")
    received = counted(metrics.WEIGHTS_RECEIVED_BYTES, "actor")
    async with divided(held, *machines) as first:
        await assert_same(await pull([first], held).fetch(), held)
    assert [machine.starts for machine in machines] == [[0, 3 * STRIPE], [STRIPE], [2 * STRIPE]]
    assert sent() == received() == held.holding.num_bytes


@pytest.mark.parametrize("shared", [True, False])
async def test_verified_bytes_are_relayed_while_stripes_still_arrive(
    shared: bool, request: pytest.FixtureRequest
) -> None:
    if not shared:
        request.getfixturevalue("no_shared_memory")
    held, machines, stores = large(), [Machine(), Machine()], [WeightStore(), WeightStore()]
    machines[1].until = STRIPE + 5 * MIB
    async with divided(held, *machines) as actor, serving(WeightsServicer(stores[0])) as (relay,):
        fetching = [
            asyncio.create_task(pull(sources, held, store).fetch())
            for sources, store in zip(([actor], [relay, actor]), stores, strict=True)
        ]
        await machines[1].reached.wait()
        last = await stores[1].get(1, held.holding.digest, 30)
        assert await last.beyond(STRIPE + PIECE - 1) == STRIPE + PIECE
        machines[1].open.set()
        for tensors in await asyncio.gather(*fetching):
            await assert_same(tensors, held)
    assert [machine.starts for machine in machines] == [[0, 2 * STRIPE], [STRIPE, 3 * STRIPE]]


async def test_a_damaged_piece_is_fetched_again_once_from_its_owner() -> None:
    held, machines = large(), [Machine(), Machine()]
    async with divided(held, *machines) as first:
        machines[1].flips = {STRIPE + 6 * MIB: 1}
        await assert_same(await pull([first], held).fetch(), held)
        assert sorted(machines[1].starts) == [STRIPE, STRIPE + PIECE, 3 * STRIPE]
        assert machines[0].starts == [0, 2 * STRIPE]
        [address] = machines[0]._store._held.striped.addresses  # type: ignore[union-attr]
        machines[1].flips = {STRIPE + 6 * MIB: 9}
        with pytest.raises(
            WeightsUnavailable, match=f"piece at byte {STRIPE + PIECE} arrived damaged twice, from {address}"
        ):
            await pull([first], held).fetch()


async def test_a_dead_holder_is_named_and_only_missing_bytes_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new group of machines sends them."""
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    held, machines, new = large(), [Machine(), Machine(), Machine()], [Machine(), Machine(), Machine()]
    machines[1].until = STRIPE + 5 * MIB
    async with AsyncExitStack() as stack:
        first, third = await stack.enter_async_context(serving(machines[0], machines[2]))
        store = WeightStore()
        async with server_of(machines[1]) as second:
            divide(held, machines, [second, third])
            begun = pull([first], held, store)
            fetching = asyncio.create_task(begun.fetch())
            await machines[1].reached.wait()
            while (part := store.find(1, held.holding.digest)) is None or part.num_verified < STRIPE + PIECE:
                await (await store.get(1, held.holding.digest, 30)).beyond(STRIPE + PIECE - 1)
            others = held.holding.num_bytes, 5 * STRIPE  # all of holders 0 and 2 has arrived
            while begun._striped is None or tuple(begun._striped._next[::2]) != others:  # noqa: ASYNC110
                await asyncio.sleep(0)  # the same thread's task
        with pytest.raises(WeightsUnavailable, match=f"from {first}: holder {second}: UNAVAILABLE"):
            await fetching
        *others, actor = [await stack.enter_async_context(server_of(each)) for each in reversed(new)]
        divide(held, new, others[::-1])
        begun.sources = [actor]
        await assert_same(await begun.fetch(), held)
    assert [machine.starts for machine in new] == [[], [STRIPE + 5 * MIB], []]


async def test_a_holder_that_stalls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALL_S", 1.0)
    monkeypatch.setattr(remote, "PATIENCE_S", 1.0)
    held, machines = large(), [Machine(), Machine()]
    machines[1].until = STRIPE
    async with divided(held, *machines) as first:
        [address] = machines[0]._store._held.striped.addresses  # type: ignore[union-attr]
        with pytest.raises(WeightsUnavailable, match=f"holder {address}: fewer than 4194304 bytes"):
            await pull([first], held).fetch()


async def test_a_holder_refuses_bytes_that_it_does_not_hold() -> None:
    held, machines = large(), [Machine(), Machine()]
    async with divided(held, *machines) as first, open_channel(first, "actor") as channel:
        named = {"version": 1, "digest": held.holding.digest}
        for offset, length in ((STRIPE, 1), (0, STRIPE + 1), (2 * STRIPE - 1, 2)):
            stub: Any = WeightsServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match="must lie in one of its stripes") as raised:
                _ = [_ async for _ in stub.FetchRange(FetchRangeRequest(**named, offset=offset, length=length))]
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="no region has all of it"):
            _ = [_ async for _ in stub.WatchRegion(WatchRegionRequest(**named))]


# ------------------------------------------------------------------------- a follower's server

MET = Rendezvous(1, 2, "127.0.0.1", 1)


@asynccontextmanager
async def of_follower(listen: str, rendezvous: Rendezvous = MET) -> AsyncIterator[StripeServer]:
    holder = StripeServer(rendezvous, listen, asyncio.get_running_loop())
    yield holder
    await holder.close()


async def serves(holder: StripeServer) -> str:
    assert holder.serve is not None
    return await asyncio.to_thread(holder.serve)


async def test_a_follower_serves_with_its_keys_to_rollouts_alone(tmp_path: Path) -> None:
    authority, keys = Authority(), {}
    for role in ("actor", "rollout", "critic"):
        (tmp_path / role).mkdir()
        keys[role] = swap(tmp_path / role, authority.keys("job", role))
    held = large()
    tls.use_keys(keys["actor"])
    async with of_follower("127.0.0.1:0") as holder:
        address = await serves(holder)
        assert await serves(holder) == address
        holder._store.put(held.holding)  # as `put` does with stripes
        tls.use_keys(keys["rollout"])
        await assert_same(await pull([address], held).fetch(), held)
        tls.use_keys(keys["critic"])
        with pytest.raises(WeightsUnavailable, match="PERMISSION_DENIED"):
            await pull([address], held).fetch()
        tls.use_keys(keys["rollout"])
        await asyncio.to_thread(holder.clear, "version 2 is being published")
        with pytest.raises(WeightsUnavailable, match="version 1 is not held here; none is held"):
            await pull([address], held).fetch()


async def test_a_follower_listens_where_it_reaches_rank_0() -> None:
    """It takes the same port if that is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with of_follower(f"127.0.0.1:{port}") as other:
            host, _, free = (await serves(other)).rpartition(":")
            assert (host, free != str(port)) == ("127.0.0.1", True)
    async with of_follower(f"127.0.0.1:{port}") as same:
        assert await serves(same) == f"127.0.0.1:{port}"


async def test_a_follower_that_rollouts_cannot_reach_serves_nothing() -> None:
    """Ranks of a pod meet on its loopback interface, and rank 0 listens on all."""
    async with of_follower("0.0.0.0:50051") as beside:
        assert beside.serve is None
    async with of_follower("0.0.0.0:50051", replace(MET, host="10.0.0.1")) as elsewhere:
        assert elsewhere.serve is not None


@pytest.mark.parametrize(
    ("striped", "said"),
    [
        (StripedHolders(addresses=["h:1"]), "stripes of 0 bytes"),
        (StripedHolders(stripe_bytes=PIECE + 1, addresses=["h:1"]), "and pieces of 4194304"),
        (StripedHolders(stripe_bytes=PIECE), "0 more holders; 1 to 1023"),
        (
            StripedHolders(stripe_bytes=PIECE, addresses=["h:1"] * 1024),
            "a list of holders of more than 1024 fields",
        ),
        (StripedHolders(stripe_bytes=PIECE, addresses=["h:1", "unix:/run/x"]), "invalid address of a holder"),
    ],
)
async def test_stripes_and_holders_that_cannot_be_are_refused(striped: StripedHolders, said: str) -> None:
    class Lying(Machine):
        async def GetManifest(self, request: Any, context: Any) -> Any:
            answer = await super().GetManifest(request, context)
            answer.striped.CopyFrom(striped)
            return answer

    held, machines = large(), [Lying(), Machine()]
    async with divided(held, *machines) as first:
        with pytest.raises(WeightsUnavailable, match=said):
            await pull([first], held).fetch()
    assert [machine.starts for machine in machines] == [[], []]
    assert stripes_of(StripedHolders(stripe_bytes=PIECE, addresses=["h:1"]), PIECE) == Stripes(PIECE, 2)
