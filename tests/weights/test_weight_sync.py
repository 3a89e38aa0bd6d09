"""New weights for all rollouts of a role: who cannot take them leaves the pool and comes back with them, and
nobody ever generates with others than were asked for."""

from __future__ import annotations

import asyncio
import os
import re
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from rollouts import generated, job_of
from sequences import sequence_batch
from serving import serve_process, served
from weight_holders import Faulty, Gated, assert_same, serving
from weight_nodes import assert_equal_models, client, nodes, trained_actor

from rolemesh.config.job import JobConfig
from rolemesh.errors import WeightsUnavailable
from rolemesh.methods import methods
from rolemesh.models.loading import load_causal_lm, named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.rpc.calling.clients import ActorClient, RolloutClient, relays_among
from rolemesh.rpc.contract import ACTOR, ROLLOUT, WEIGHTS
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.actor.servicer import ActorServicer
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.rollout.servicer import RolloutServicer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics
from rolemesh.v1.rollout_pb2 import UpdateWeightsRequest
from rolemesh.v1.rollout_pb2_grpc import RolloutServiceStub
from rolemesh.weights import region
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore
from rolemesh.weights.weight_source import WeightSource


@pytest.fixture
def job(tiny_model: Path) -> JobConfig:
    return job_of(tiny_model)


def mappings(pid: int | str = "self") -> list[tuple[range, str, dict[str, int]]]:
    """Of a process's regions: the addresses, the name of the file, and how much is what (KiB, as the kernel
    counts: Rss, Pss, Anonymous, ...)."""
    found: list[tuple[range, str, dict[str, int]]] = []
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in (address := line.split()[0]):
            start, end = (int(part, 16) for part in address.split("-"))
            found.append((range(start, end), line.split(None, 5)[-1], {}))
        elif line.endswith("kB"):
            found[-1][2][address.removesuffix(":")] = int(line.split()[1])
    return [mapping for mapping in found if "memfd:rolemesh-weights" in mapping[1]]


@pytest.mark.parametrize("shared", [True, False])
async def test_every_engine_has_the_actors_parameters_bit_for_bit(
    job: JobConfig, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shared:
        monkeypatch.setattr(region, "CAN_SHARE", False)
    sent = metrics.WEIGHTS_SENT_BYTES.labels("actor")._value
    async with (
        nodes(*(RolloutWorker(job) for _ in range(4))) as replicas,
        trained_actor(job) as (actor, worker),
        client(job, *replicas) as rollout,
    ):
        for version in (1, 2):
            before = sent.get()
            await rollout.update_weights(await actor.publish_weights(version))
            for node in replicas:
                assert node.worker.version == version
                assert_equal_models(node.model, worker.model)
            num_bytes = sum(tensor.nbytes for tensor in named_weights(worker.model).values())
            assert sent.get() - before <= 1.2 * num_bytes * (not shared)
            await actor.update(sequence_batch(16))


async def test_each_replica_has_at_most_eight_sources(job: JobConfig) -> None:
    """The replicas 1, 2, 4, … places before it, and the actor last."""
    told: dict[int, list[str]] = {}

    class Told(RolloutWorker):
        async def update_weights(self, source: WeightSource) -> None:
            assert isinstance(source, RemoteWeights)
            told[workers.index(self)] = source.sources
            await super().update_weights(source)

    workers: list[RolloutWorker] = [Told(job) for _ in range(12)]
    async with nodes(*workers) as replicas, trained_actor(job) as (actor, _), client(job, *replicas) as rollout:
        published = await actor.publish_weights(1)
        assert isinstance(published, RemoteWeights)
        await rollout.update_weights(published)
    chain = [node.address for node in replicas]
    for place, back in ((0, []), (1, [1]), (3, [1, 2]), (11, [1, 2, 4, 8])):
        assert told[place] == [*(chain[place - each] for each in back), *published.sources]
    many = [f"rollout-{place}:1" for place in range(5000)]
    assert relays_among(many) == [f"rollout-{5000 - back}:1" for back in (1, 2, 4, 8, 16, 32, 64)]


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_all_engines_of_a_machine_share_pages_and_write_to_none(job: JobConfig) -> None:
    others = {name for _, name, _ in mappings()}  # of earlier tests, which nobody has collected yet
    async with (
        nodes(*(RolloutWorker(job) for _ in range(3))) as replicas,
        trained_actor(job) as (actor, worker),
        client(job, *replicas) as rollout,
    ):
        for version in (1, 2):
            await rollout.update_weights(await actor.publish_weights(version))
            await generated(rollout)
            there = [mapping for mapping in mappings() if mapping[1] not in others]
            owners = {
                addresses: name
                for addresses, name, _ in there
                for node in replicas
                for weight in named_weights(node.model).values()
                if weight.data_ptr() in addresses
            }
            assert len(owners) == 3  # each replica has a mapping
            assert len(set(owners.values())) == 1  # of one file
            for _, name, kib in there:
                assert kib["Anonymous"] == 0  # a page that somebody wrote to becomes a copy of his own
                assert name in owners.values(), "the version before is still there"
            for node in replicas:
                assert_equal_models(node.model, worker.model)
            await actor.update(sequence_batch(16))


async def test_a_rollout_beside_its_actor_needs_no_copy_or_socket(job: JobConfig) -> None:
    taken: list[dict[str, torch.Tensor]] = []

    class Watching(RolloutWorker):
        async def update_weights(self, source: WeightSource) -> None:
            taken.append(await source.fetch())
            await super().update_weights(source)

    store, server = WeightStore(), RoleServer({"actor": [ACTOR, WEIGHTS], "rollout": [ROLLOUT]})
    actor_worker, worker = ActorWorker(job), Watching(job)
    address = await server.start("127.0.0.1:0")
    await server.ready(
        {
            ACTOR: ActorServicer(actor_worker, store),
            WEIGHTS: WeightsServicer(store),
            ROLLOUT: RolloutServicer(worker, store),
        }
    )
    received = [metrics.WEIGHTS_RECEIVED_BYTES.labels(source)._value for source in ("actor", "memory")]
    before = [value.get() for value in received]
    async with ActorClient([address], methods(job)) as actor, RolloutClient([address], methods(job)) as rollout:
        await actor.update(sequence_batch(16))
        source = await actor.publish_weights(1)
        assert isinstance(source, RemoteWeights)
        await rollout.update_weights(source)
    held = store.find(1, source.digest)
    assert held is not None
    there = held.tensors()
    assert all(tensor.data_ptr() == there[name].data_ptr() for name, tensor in taken[0].items())
    assert [value.get() for value in received] == before
    model = worker._engine.model  # type: ignore[attr-defined]
    assert all(tensor.data_ptr() == there[name].data_ptr() for name, tensor in named_weights(model).items())
    assert_equal_models(model, actor_worker.model)
    await server.drain(0)


# ------------------------------------------------------------------- replicas that come and go


async def test_a_late_or_restarted_replica_catches_up_from_the_others(job: JobConfig) -> None:
    async with (
        nodes(*(RolloutWorker(job) for _ in range(3))) as replicas,
        trained_actor(job) as (actor, worker),
    ):
        await replicas[1].stop()
        async with client(job, *replicas) as rollout:
            await rollout.update_weights(await actor.publish_weights(1))
            replicas[1].worker = RolloutWorker(job)
            await replicas[1].start()
            await rollout.wait_until_ready(120)
            assert replicas[1].worker.version == 1
            assert_equal_models(replicas[1].model, worker.model)


async def test_a_chain_is_made_of_live_replicas(job: JobConfig) -> None:
    """The middle one is gone: the last pulls from the first, and the actor still sends each byte once."""
    asked: list[list[str]] = []

    class Asked(RolloutServicer):
        async def UpdateWeights(self, request: UpdateWeightsRequest, context: Any) -> Any:
            asked.append(list(request.sources))
            return await super().UpdateWeights(request, context)

    async with nodes(*(RolloutWorker(job) for _ in range(3))) as replicas, trained_actor(job) as (actor, _):
        store = WeightStore()
        last = {ROLLOUT: Asked(replicas[2].worker, store), WEIGHTS: WeightsServicer(store)}
        await replicas[2].server.ready(last)
        async with client(job, *replicas) as rollout:
            await replicas[1].stop()
            rollout.pool.suspect(rollout.pool.replicas[1], "it is gone")
            await rollout.update_weights(await actor.publish_weights(1))
    assert asked == [[replicas[0].address, actor.pool.addresses]]


# ------------------------------------------------------------------------------------ processes


async def test_a_relay_killed_in_mid_pull_costs_only_unverified_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real relay between a sender and a receiver of this process, over the network."""
    monkeypatch.setattr(region, "CAN_SHARE", False)
    wide = make_tiny_model(tmp_path / "wide", hidden_size=512, num_layers=4)  # six pieces and more
    job = job_of(wide)
    held = PublishedWeights(1, named_weights(load_causal_lm(job.actor.model, "actor")))
    assert held.holding.num_bytes > 24 << 20
    store, gated, good = WeightStore(), Gated(held, 13 << 20), Faulty(held)
    digest = held.holding.digest
    async with (
        serve_process("rollout", job, tmp_path) as relay,
        serving(gated, good) as (first, second),
        RolloutClient([relay.address], methods(job)) as rollout,
    ):
        await rollout.wait_until_ready(120)
        telling = asyncio.create_task(rollout.update_weights(RemoteWeights([first], 1, digest)))
        fetching = asyncio.create_task(RemoteWeights([relay.address, second], 1, digest, store=store).fetch())
        await gated.reached.wait()
        part = await store.get(1, digest, 30)
        assert await part.beyond(11 << 20) == 12 << 20
        os.kill(relay.process.pid, 9)
        await assert_same(await fetching, held)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    assert good.starts == [12 << 20]


@pytest.mark.skipif(not region.CAN_SHARE, reason="sealed memory is Linux's")
async def test_a_rollout_process_never_holds_more_than_two_regions(tiny_model: Path, tmp_path: Path) -> None:
    job = job_of(tiny_model)
    async with (
        serve_process("rollout", job, tmp_path) as process,
        served("actor", job) as actors,
        ActorClient(actors, methods(job)) as actor,
        RolloutClient([process.address], methods(job)) as rollout,
    ):
        await rollout.wait_until_ready(120)
        for version in range(1, 5):
            await actor.update(sequence_batch(16))
            await rollout.update_weights(await actor.publish_weights(version))
            await generated(rollout)
            ((_, name, kib),) = await asyncio.to_thread(mappings, process.process.pid)
            assert kib["Rss"] > kib["Anonymous"] == 0
            assert name in [own for _, own, _ in mappings()]
        shown = urllib.request.urlopen(f"http://{process.metrics}/metrics").read().decode()  # noqa: ASYNC210
    assert 'rolemesh_weights_version{role="rollout"} 4.0' in shown
    assert "rolemesh_weights_sync_seconds_count 4.0" in shown
    assert re.search(r'rolemesh_weights_received_bytes_total\{source="memory"\} [1-9]', shown)


async def test_a_reused_version_number_names_the_current_weights(job: JobConfig) -> None:
    """A second controller may count from the beginning again, with an actor that has learnt meanwhile."""
    async with trained_actor(job) as (actor, _):
        first, same = await actor.publish_weights(1), await actor.publish_weights(1)
        assert first.digest == same.digest
        await actor.update(sequence_batch(16))
        assert (await actor.publish_weights(1)).digest != first.digest


async def test_a_replica_waits_for_weights_no_longer_than_the_job_says(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever deadline it has: others wait for their turn meanwhile."""
    monkeypatch.setattr(region, "CAN_SHARE", False)
    worker = RolloutWorker(job_of(tiny_model, weight_sync_timeout_s=1.0))
    engine: Any = worker._engine
    held = PublishedWeights(1, named_weights(engine.model))
    silent = Gated(held, 0)
    async with nodes(worker) as [node], serving(silent) as sources:
        async with grpc.aio.insecure_channel(node.address) as channel:
            update = RolloutServiceStub(channel).UpdateWeights  # type: ignore[no-untyped-call]  # generated
            request = UpdateWeightsRequest(sources=sources, version=1, digest=held.holding.digest)
            for timeout_s in (600.0, None):
                with pytest.raises(grpc.aio.AioRpcError, match=r"NOT_FOUND[^$]* within 0.9 s"):
                    await update(request, timeout=timeout_s)
        silent.open.set()
    worker.close()


async def test_a_replica_asks_for_no_byte_of_another_models_weights(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "CAN_SHARE", False)
    worker = RolloutWorker(job_of(tiny_model))
    engine: Any = worker._engine
    weights = named_weights(engine.model)
    held = PublishedWeights(1, {**weights, "model.norm.weight": torch.zeros(3)})
    watched = Faulty(held)
    async with serving(watched) as sources:
        source = RemoteWeights(sources, 1, held.holding.digest)
        with pytest.raises(WeightsUnavailable, match=r"does not fit .*norm.weight is \[3\] torch.float32, not"):
            await worker.update_weights(source)
    assert watched.starts == []
    assert worker.version == 0
    worker.close()
