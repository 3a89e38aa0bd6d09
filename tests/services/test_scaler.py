"""KEDA's external scaler over a real channel: how much work there is for a role, and whether it is to run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from membership import Told, until
from serving import gate, reward_batch, reward_job, served

from rolemesh.externalscaler import externalscaler_pb2 as pb
from rolemesh.roles import methods
from rolemesh.rpc.clients import RewardClient
from rolemesh.rpc.contract import deserializer, rpcs, serializer
from rolemesh.rpc.server import RoleServer
from services.controller.scaler import SERVICE, ScalerServicer

RPCS = {rpc.name: rpc for rpc in rpcs(SERVICE)}


def scaled(**metadata: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="rlhf-job-reward", namespace="here", scalerMetadata=metadata)


class Keda:
    """What KEDA calls, by the names that its own proto has."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        rpc = RPCS[name]
        assert rpc.path == f"/externalscaler.ExternalScaler/{name}"
        make: Any = self._channel.unary_stream if rpc.streams[1] else self._channel.unary_unary
        return make(rpc.path, serializer(rpc.request), deserializer(rpc.response))

    async def pending(self, **metadata: str) -> int:
        request = pb.GetMetricsRequest(scaledObjectRef=scaled(**metadata), metricName="pending_rows")
        [value] = (await self.GetMetrics(request)).metricValues
        assert value.metricName == "pending_rows"
        assert value.metricValueFloat == value.metricValue
        return int(value.metricValue)


@asynccontextmanager
async def keda(client: RewardClient) -> AsyncIterator[Keda]:
    server = RoleServer({"controller": [SERVICE]})
    address = await server.start("127.0.0.1:0")
    await server.ready({SERVICE: ScalerServicer({"reward": client.pool})})
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield Keda(channel)
    finally:
        await server.drain(0)


async def test_pending_rows_are_those_that_wait_and_those_that_are_computed(
    tiny_model: Path, tmp_path: Path
) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as doors:
        job = reward_job(tiny_model, tmp_path, started=str(started.path), gate=str(doors.path))
        async with (
            served("reward", job) as addresses,
            RewardClient(Told(*addresses), methods(job), may_grow=True) as client,
            keda(client) as scaler,
        ):
            reward = scaled(role="reward")
            assert await scaler.pending(role="reward") == 0
            assert not (await scaler.IsActive(reward)).result
            told = aiter(scaler.StreamIsActive(reward))
            assert not (await anext(told)).result
            call = asyncio.create_task(client.compute_scores(reward_batch(100)))
            await started.passed(call)
            assert (await anext(told)).result
            assert (await scaler.IsActive(reward)).result
            assert await scaler.pending(role="reward") == 100
            doors.open()
            await call
            assert not (await anext(told)).result
            assert await scaler.pending(role="reward") == 0


async def test_a_role_that_a_run_waits_for_is_active(tiny_model: Path, tmp_path: Path) -> None:
    """Though it has no row yet: it may have been scaled to zero."""
    job = reward_job(tiny_model, tmp_path)
    async with RewardClient(Told(), methods(job), may_grow=True) as client, keda(client) as scaler:
        waiting = asyncio.create_task(client.wait_until_ready(30))
        await until(client.pool, lambda: client.pool.pending_rows)
        assert (await scaler.IsActive(scaled(role="reward"))).result
        waiting.cancel()


async def test_the_target_is_what_the_trigger_says(tiny_model: Path, tmp_path: Path) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with RewardClient(Told(), methods(job)) as client, keda(client) as scaler:
        for metadata, target in (({}, 64), ({"pendingPerReplica": "8"}, 8)):
            [spec] = (await scaler.GetMetricSpec(scaled(role="reward", **metadata))).metricSpecs
            assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("pending_rows", target, target)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"role": "reword"}, "rlhf-job-reward scales role 'reword'; the job has reward"),
        ({}, "scales role ''"),
        ({"role": "reward", "pendingPerReplica": "many"}, "pendingPerReplica 'many'"),
        ({"role": "reward", "pendingPerReplica": "0"}, "number of rows above 0"),
    ],
)
async def test_a_trigger_that_cannot_be_is_refused(
    metadata: dict[str, str], words: str, tiny_model: Path, tmp_path: Path
) -> None:
    job = reward_job(tiny_model, tmp_path)
    async with RewardClient(Told(), methods(job)) as client, keda(client) as scaler:
        with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
            await scaler.GetMetricSpec(scaled(**metadata))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
