"""Versions that cannot be taken, or are taken while requests come: nobody generates with others than were asked
for."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rollouts import generated, job_of
from sequences import sequence_batch
from weight_holders import Faulty, Gated, pull, serving
from weight_nodes import assert_equal_models, client, nodes, trained_actor

from rolemesh.config.job import JobConfig
from rolemesh.errors import RoleUnavailable, WeightsUnavailable
from rolemesh.models.loading import named_weights
from rolemesh.models.tiny import make_tiny_model
from rolemesh.rpc.calling.clients import RolloutClient
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics
from rolemesh.weights import region, remote
from rolemesh.weights.manifest import name_of
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.weight_source import WeightSource


@pytest.fixture
def job(tiny_model: Path) -> JobConfig:
    return job_of(tiny_model)


class Once(RolloutWorker):
    """Cannot take weights until it is let."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job)
        self.open = False

    async def update_weights(self, source: WeightSource) -> None:
        if not self.open:
            raise WeightsUnavailable(f"no room for version {source.version}")
        await super().update_weights(source)


async def test_a_replica_leaves_the_pool_until_it_can_take_a_version(
    job: JobConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """It returns with the current version."""
    late = Once(job)
    failures = metrics.WEIGHTS_SYNC_FAILURES._value
    before = failures.get()
    async with (
        nodes(RolloutWorker(job), late) as replicas,
        trained_actor(job) as (actor, _),
        client(job, *replicas) as rollout,
    ):
        for version in (1, 2):
            await rollout.update_weights(await actor.publish_weights(version))
            assert [r.live for r in rollout.pool.replicas] == [True, False]
            await actor.update(sequence_batch(16))
        assert failures.get() > before
        assert f"rollout at {replicas[1].address} gets no work" in caplog.text
        assert "no room for version 1" in caplog.text
        alone = await generated(rollout)
        late.open = True
        await rollout.wait_until_ready(120)
        assert late.version == 2
        assert_equal_models(replicas[1].model, replicas[0].model)
        both = await generated(rollout)
        assert torch.equal(both["rollout_log_probs"], alone["rollout_log_probs"])


async def test_a_version_that_no_replica_can_take_says_why_for_each(job: JobConfig, tmp_path: Path) -> None:
    other = job_of(make_tiny_model(tmp_path, "llama"))
    async with (
        nodes(RolloutWorker(other), Once(job)) as replicas,
        trained_actor(job) as (actor, _),
        client(job, *replicas) as rollout,
    ):
        with pytest.raises(WeightsUnavailable) as raised:
            await rollout.update_weights(await actor.publish_weights(1))
    first, second = (f"rollout.UpdateWeights at {node.address}, step 0: " for node in replicas)
    assert re.search(f"no rollout could load weights version 1: {first}.*does not fit", str(raised.value))
    assert f"{second}no room for version 1" in str(raised.value)


async def test_a_right_number_with_another_digest_generates_nothing(job: JobConfig) -> None:
    """A rollout service outlives a run; neither version 1 nor 2 of another run is this run's version 1."""
    async with nodes(RolloutWorker(job)) as replicas:
        async with trained_actor(job) as (actor, _), client(job, *replicas) as rollout:
            await rollout.update_weights(await actor.publish_weights(1))
            of_first_run = await generated(rollout)
            await rollout.update_weights(await actor.publish_weights(2))
        async with trained_actor(job) as (actor, worker), client(job, *replicas) as rollout:
            await actor.update(sequence_batch(16))
            source = await actor.publish_weights(1)
            assert isinstance(source, RemoteWeights)
            rollout._dispatcher.metadata["rolemesh-weights-version"] = source.name
            with pytest.raises(RoleUnavailable, match=r"expected weights version 1@\w+; this replica has 2@"):
                await generated(rollout)
            await rollout.update_weights(source)
            assert_equal_models(replicas[0].model, worker.model)
            assert not torch.equal(
                (await generated(rollout))["rollout_log_probs"], of_first_run["rollout_log_probs"]
            )


async def test_a_request_during_a_version_change_gets_the_new_version(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "CAN_SHARE", False)
    worker = RolloutWorker(job)
    held = PublishedWeights(
        1, {name: torch.randn_like(w) for name, w in named_weights(worker._engine.model).items()}
    )  # type: ignore[attr-defined]
    gated = Gated(held, 0)
    async with nodes(worker) as replicas, serving(gated) as addresses, client(job, *replicas) as rollout:
        update = asyncio.create_task(rollout.update_weights(RemoteWeights(addresses, 1, held.holding.digest)))
        await gated.reached.wait()
        asked = asyncio.create_task(generated(rollout))
        gated.open.set()
        await update
        assert set((await asked)["weight_versions"].unique().tolist()) <= {-1, 1}


async def health(address: str) -> list[bool]:
    """Whether the service, the role and the server are SERVING."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = ("rolemesh.v1.RolloutService", "rollout", "")
        answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
        return [answer.status == health_pb2.HealthCheckResponse.SERVING for answer in answers]


async def versions(client: RolloutClient, name: str) -> set[int]:
    """Of the weights that answer a request which counts on some."""
    client._dispatcher.metadata["rolemesh-weights-version"] = name
    answer = await generated(client)
    return set(answer["weight_versions"][answer["response_mask"]].tolist())


async def test_the_service_stays_healthy_from_its_first_version_on(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a version is pulled, and after an update that failed, it answers with the one before."""
    monkeypatch.setattr(region, "CAN_SHARE", False)
    worker = RolloutWorker(job)
    own = named_weights(worker._engine.model)  # type: ignore[attr-defined]
    held = [PublishedWeights(version, own) for version in (1, 2)]
    names = [name_of(each.version, each.holding.digest) for each in held]
    gated = Gated(held[1], 0)
    async with nodes(worker) as (node,), serving(Faulty(held[0]), gated) as (first, second):
        assert await health(node.address) == [False, True, True]
        async with client(job, node) as rollout:
            with pytest.raises(WeightsUnavailable):
                await rollout.update_weights(RemoteWeights([first], 1, "0" * 64))
            assert await health(node.address) == [False, True, True]
            await rollout.update_weights(pull([first], held[0]))
            assert await health(node.address) == [True, True, True]
            update = asyncio.create_task(rollout.update_weights(pull([second], held[1])))
            await gated.reached.wait()
            assert await health(node.address) == [True, True, True]
            assert await versions(rollout, names[0]) == {1}
            gated.open.set()
            await update
            assert await versions(rollout, names[1]) == {2}
            with pytest.raises(WeightsUnavailable):
                await rollout.update_weights(RemoteWeights([second], 3, "0" * 64))
            assert await health(node.address) == [True, True, True]
        async with client(job, node) as rollout:
            assert await versions(rollout, names[1]) == {2}


async def test_a_caller_gone_during_a_pull_leaves_the_old_version_used(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "CAN_SHARE", False)
    monkeypatch.setattr(remote, "STALL_S", 600.0)  # a pull that nobody ends goes on
    worker = RolloutWorker(job)
    own = named_weights(worker._engine.model)  # type: ignore[attr-defined]
    held = [PublishedWeights(version, own) for version in (1, 2)]
    gated = Gated(held[1], 0)
    async with nodes(worker) as (node,), serving(Faulty(held[0]), gated) as (first, second):
        async with client(job, node) as rollout:
            await rollout.update_weights(pull([first], held[0]))
        async with client(job, node) as rollout:
            update = asyncio.create_task(rollout.update_weights(pull([second], held[1])))
            await gated.reached.wait()
            update.cancel()
            await asyncio.gather(update, return_exceptions=True)
        async with client(job, node) as rollout:
            assert await versions(rollout, name_of(1, held[0].holding.digest)) == {1}
            assert await health(node.address) == [True, True, True]
            # The pull has ended with its caller, and not with its own 18 s: nobody waits for it.
            rollout._sync_timeout_s = 10.0
            await rollout.update_weights(pull([first], held[0]))
            gated.open.set()
            await rollout.update_weights(pull([second], held[1]))
            assert await versions(rollout, name_of(2, held[1].holding.digest)) == {2}


class Swapping(RolloutWorker):
    """Says when weights have been fetched, and swaps them in, or breaks, once it is let."""

    def __init__(self, job: JobConfig, error: Exception | None = None) -> None:
        super().__init__(job)
        self.fetched, self.open, self.error = asyncio.Event(), asyncio.Event(), error

    async def update_weights(self, source: WeightSource) -> None:
        await source.fetch()
        self.fetched.set()
        await self.open.wait()
        if self.error is not None and source.version > 1:
            raise self.error
        await super().update_weights(source)


async def test_a_begun_swap_ends_even_without_its_caller(job: JobConfig) -> None:
    worker = Swapping(job)
    own = named_weights(worker._engine.model)  # type: ignore[attr-defined]
    held = PublishedWeights(1, own)
    async with nodes(worker) as (node,), serving(Faulty(held)) as (source,):
        async with client(job, node) as rollout:
            update = asyncio.create_task(rollout.update_weights(pull([source], held)))
            await worker.fetched.wait()
            update.cancel()
            await asyncio.gather(update, return_exceptions=True)
            for replica in rollout.pool.replicas:  # on the same connection: the server knows by now
                assert await replica.health() == ""
        worker.open.set()
        async with client(job, node) as rollout:
            assert await versions(rollout, name_of(1, held.holding.digest)) == {1}
            assert await health(node.address) == [True, True, True]


async def test_a_half_failed_swap_disables_the_replica_until_the_next(
    job: JobConfig,
) -> None:
    worker = Swapping(job, RuntimeError("the device is gone"))
    worker.open.set()
    own = named_weights(worker._engine.model)  # type: ignore[attr-defined]
    held = [PublishedWeights(version, own) for version in (1, 2)]
    async with nodes(worker) as (node,), serving(*map(Faulty, held)) as addresses, client(job, node) as rollout:
        sources = [pull([a], h) for a, h in zip(addresses, held, strict=True)]
        await rollout.update_weights(sources[0])
        with pytest.raises(WeightsUnavailable, match="the device is gone"):
            await rollout.update_weights(sources[1])
        assert await health(node.address) == [False, True, True]
        worker.error = None
        await rollout.wait_until_ready(120)
        assert await health(node.address) == [True, True, True]
        assert await versions(rollout, sources[1].name) == {2}
