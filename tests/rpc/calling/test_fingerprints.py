"""Old and new job at once: a controller gives work only to replicas that were started with its own job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from membership import Listed, until
from reward_rows import batch, job

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleUnavailable
from rolemesh.rpc.calling import reminder
from rolemesh.rpc.calling.clients import RewardClient
from rolemesh.rpc.calling.discovery import Members
from rolemesh.rpc.contract import REWARD
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.controller.role_clients import new_client
from rolemesh.services.processes.serve import group_server, load_group

LOCAL = "127.0.0.1:0"
WRONG = ("openai/gsm8k", "#### 5", "72")  # a wrong answer in the right format, which gets reward.format_score


def rewards(model: Path) -> tuple[JobConfig, JobConfig]:
    """The old job and the new one."""
    return job(model, format_score=0.25), job(model, format_score=0.5)


@asynccontextmanager
async def started(its_job: JobConfig | None, servicers: Any, listen: str = LOCAL) -> AsyncIterator[str]:
    server = group_server(["reward"], its_job)
    address = await server.start(listen)
    await server.ready(servicers)
    try:
        yield address
    finally:
        await server.drain(0)


def client_of(its_job: JobConfig, addresses: Sequence[str] | Members) -> RewardClient:
    client = new_client("reward", addresses, its_job)
    assert isinstance(client, RewardClient)
    return client


async def until_seen(mismatch: Callable[[], object]) -> None:
    """Return once a health check has seen that a replica has another job. It tells nobody who waits."""
    async with asyncio.timeout(120):
        while not mismatch():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def said(record: logging.LogRecord) -> str:
    return record.getMessage()


async def scores(client: RewardClient, rows: int = 16) -> list[float]:
    answer: DataProto = await client.compute_scores(batch(*[WRONG] * rows))
    return list(answer["token_level_scores"].sum(1).tolist())


async def test_a_replica_with_the_old_job_gets_no_rows(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the old controller takes no replica with the new job."""
    old, new = rewards(tiny_model)
    of_old, of_new = [(await load_group(["reward"], each))[1] for each in (old, new)]
    async with started(new, of_new) as there:
        async with started(old, of_old) as here:
            for its_job, own, others, score in ((new, there, here, 0.5), (old, here, there, 0.25)):
                caplog.clear()
                async with client_of(its_job, listed := Listed(others)) as client:
                    await until_seen(lambda: [each.mismatch for each in client.pool.replicas if each.mismatch])
                    with pytest.raises(RoleUnavailable, match=r"which differs in reward\.format_score"):
                        await client.wait_until_ready(0.5)
                    listed.tell(own, others)
                    await client.wait_until_ready(60)
                    assert await scores(client) == [score] * 16
                    assert [replica.address for replica in client.pool.live] == [own]
                [line] = [line for line in map(said, caplog.records) if "is not used until" in line]
                assert line.startswith(f"reward at {others} is not used until it is restarted: it was started")
        async with (
            client_of(new, Listed(here, there)) as client,
            started(new, of_new, here),
        ):
            await until(client.pool, lambda: len(client.pool.live) == 2)


async def test_a_replica_restarted_with_another_job_gets_no_more_rows(
    tiny_model: Path,
) -> None:
    """Between two calls, so that no call breaks off: the call itself names the fingerprint that was seen."""
    own, other = rewards(tiny_model)
    of_own, of_other = [(await load_group(["reward"], each))[1] for each in (own, other)]
    async with started(own, of_own) as stays:
        async with started(own, of_own) as changes:
            client = client_of(own, [stays, changes])
            await client.wait_until_ready(60)
            assert await scores(client) == [0.25] * 16
        async with started(other, of_other, changes):
            assert await scores(client) == [0.25] * 16
            assert [replica.address for replica in client.pool.live] == [stays]
            [left_out] = [replica for replica in client.pool.replicas if not replica.live]
            await until_seen(lambda: left_out.mismatch)
        await client.close()


async def test_a_wait_for_an_actor_of_another_job_is_logged_repeatedly(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor reports its job before it has loaded a model."""
    monkeypatch.setattr(reminder, "REMIND_S", 0.05)
    own = job(tiny_model)
    of_another = own.model_copy(update={"actor": own.actor.model_copy(update={"grad_clip": 0.5, "seed": 7})})
    server = group_server(["actor"], of_another)
    address = await server.start(LOCAL)
    differs = "it was started with another job, which differs in actor.grad_clip, actor.seed"
    try:
        async with new_client("actor", [address], own) as client:
            with pytest.raises(RoleUnavailable) as error:
                await client.wait_until_ready(3.0)
        async with new_client("actor", Listed(address), own) as client:
            await until_seen(lambda: [each.mismatch for each in client.pool.replicas if each.mismatch])
            with pytest.raises(RoleUnavailable, match=r"no replica has answered.*differs in actor\.grad_clip"):
                await client.wait_until_ready(1.0)
    finally:
        await server.drain(0)
    assert str(error.value).startswith("actor was not ready within 3 s (waiting since ")
    assert str(error.value).endswith(f"at {address}: {differs}")
    lines = [record for record in caplog.records if "actor: waiting for a replica, for " in said(record)]
    assert len(lines) > 2
    assert said(lines[-1]).endswith(f"s (at {address}: {differs})")
    assert lines[-1].levelno == logging.WARNING


async def test_a_foreign_server_is_used_and_an_old_rolemesh_is_refused(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server in another language has no fingerprint."""
    own, _ = rewards(tiny_model)
    foreign, health = grpc.aio.server(), aio.HealthServicer()
    add_HealthServicer_to_server(health, foreign)
    address = f"127.0.0.1:{foreign.add_insecure_port(LOCAL)}"
    await health.set("reward", health_pb2.HealthCheckResponse.SERVING)
    await foreign.start()
    async with client_of(own, [address]) as client:
        await client.wait_until_ready(60)
        assert not await client.pool.replicas[0].health()
    await foreign.stop(None)
    line = f"reward at {address} does not say of which job it is; it is used as it is"
    assert [said(record) for record in caplog.records].count(line) == 1

    async with started(None, {}) as address, client_of(own, [address]) as client:
        with pytest.raises(RoleUnavailable, match="an older version of Rolemesh"):
            await client.wait_until_ready(0.1)
    older = '{"version":"0.0.9","keys":{}}'
    for metadata, problem in (("{}", "its fingerprint is invalid"), (older, "version '0.0.9'")):
        server = RoleServer({"reward": [REWARD]}, fingerprints={"reward": metadata})
        async with client_of(own, [await server.start(LOCAL)]) as client:
            with pytest.raises(RoleUnavailable, match=problem):
                await client.wait_until_ready(0.1)
        await server.drain(0)
