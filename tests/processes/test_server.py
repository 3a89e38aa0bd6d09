"""`rolemesh serve`: loading told from ready, drain, and an end in every case. Real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from serving import gate, reward_batch, reward_job, serve_process, served

from rolemesh.errors import InvalidConfig, RoleUnavailable
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import RewardClient
from rolemesh.rpc.contract import REWARD
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.processes.shutdown import DRAIN_S, Shutdown

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = ("", "rolemesh.v1.RewardService")


async def until_not_serving(channel: grpc.aio.Channel) -> None:
    async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
        if answer.status == NOT_SERVING:
            return


async def test_a_role_ends_with_its_launcher_though_it_computes(tiny_model: Path, tmp_path: Path) -> None:
    """Standard input closes, as it does when the launcher is killed; the computing thread never returns."""
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as never:
        job = reward_job(tiny_model, tmp_path, started=str(started.path), gate=str(never.path))
        async with (
            serve_process("reward", job, tmp_path) as role,
            RewardClient([role.address], methods(job), patience_s=0.1) as client,
        ):
            await client.wait_until_ready(120)
            page = await asyncio.to_thread(
                lambda: urllib.request.urlopen(f"http://{role.metrics}/metrics").read()
            )
            assert b'rolemesh_role_ready{rank="0",role="reward"} 1.0' in page
            running = asyncio.create_task(client.compute_scores(reward_batch(1)))
            await started.passed(running)
            role.process.stdin.close()
            assert await asyncio.wait_for(role.process.wait(), 100) == 0
            with pytest.raises(RoleUnavailable):
                await running


async def test_a_second_signal_ends_the_process_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with gate(tmp_path / "started") as started, gate(tmp_path / "gate") as never:
        job = reward_job(tiny_model, tmp_path, started=str(started.path), gate=str(never.path))
        async with (
            serve_process("reward", job, tmp_path) as role,
            RewardClient([role.address], methods(job), patience_s=0.1) as client,
            grpc.aio.insecure_channel(role.address) as channel,
        ):
            await client.wait_until_ready(120)
            running = asyncio.create_task(client.compute_scores(reward_batch(1)))
            await started.passed(running)
            role.process.send_signal(signal.SIGTERM)
            await until_not_serving(channel)
            role.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(DRAIN_S):  # before it would have ended by itself
                assert await role.process.wait() == 128 + signal.SIGTERM
            with pytest.raises(RoleUnavailable):
                await running


async def test_a_signal_gives_running_calls_the_configured_time() -> None:
    ending = Shutdown(with_parent=False, drain_s=900)
    os.kill(os.getpid(), signal.SIGTERM)
    await ending.begun.wait()
    assert (ending.reason, ending.grace_s) == ("got SIGTERM", 900)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_role_that_cannot_load_exits_with_one_line(tmp_path: Path) -> None:
    job = reward_job(tmp_path / "nowhere", tmp_path)
    async with serve_process("reward", job, tmp_path) as role:
        _, errors = await role.process.communicate()
        assert role.process.returncode == 2
        last = errors.decode().splitlines()[-1]
        assert last.startswith("error: ")
        assert "nowhere" in last


async def test_reflection_lists_and_describes_every_service(tiny_model: Path, tmp_path: Path) -> None:
    async with served("reward", reward_job(tiny_model, tmp_path)) as [address]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            names = await asyncio.to_thread(database.get_services)
            file = await asyncio.to_thread(database.FindFileContainingSymbol, "rolemesh.v1.RewardService")
    assert {"rolemesh.v1.RewardService", "grpc.health.v1.Health"} <= set(names)
    assert [method.name for method in file.service[0].method] == ["ComputeScores"]


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidConfig, match=f"reward cannot listen on {re.escape(listen)}: .*in use"):
            await RoleServer({"reward": [REWARD]}).start(listen)


async def test_two_roles_cannot_share_a_port() -> None:
    first = RoleServer({"reward": [REWARD]})
    address = await first.start("127.0.0.1:0")
    with pytest.raises(InvalidConfig, match="in use"):
        await RoleServer({"reward": [REWARD]}).start(address)
    await first.drain(0)


@pytest.mark.parametrize("listen", [":50051", "50051", "127.0.0.1", "127.0.0.1:port", "::1:5", "h:70000"])
async def test_an_address_names_its_host(listen: str) -> None:
    """An address without a host would listen to the world."""
    with pytest.raises(InvalidConfig, match="host:port"):
        await RoleServer({"reward": [REWARD]}).start(listen)
