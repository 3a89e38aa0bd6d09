"""The answers to probes, on a port of their own, whatever the roles do."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from sequences import sequence_batch
from serving import Gate, gate, reward_batch, reward_job, serve_process

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config.job import JobConfig, make_job
from rolemesh.errors import RoleUnavailable
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import ActorClient, RewardClient
from rolemesh.rpc.channels import CLIENT_OPTIONS
from rolemesh.rpc.contract import REWARD
from rolemesh.rpc.serving.server import RoleServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# A policy loss that tells when it is computed, and then computes gradients until the test lets it end.
HELD = """
import os
import select

import torch

from rolemesh.algos.policy_loss import TokenLosses
from rolemesh.plugins import policy_loss

@policy_loss("held")
def held(log_probs, old_log_probs, advantages, response_mask):
    if len(log_probs) > 1:  # with one row it is tried before the model loads
        os.write(os.open({begun!r}, os.O_WRONLY), b".")
        go_on = os.open({go_on!r}, os.O_RDONLY | os.O_NONBLOCK)
        weight = torch.randn(256, 256, requires_grad=True)
        while not select.select([go_on], [], [], 0)[0]:
            (weight @ weight).sum().backward()
    return TokenLosses(-advantages * log_probs)
"""


async def check(channel: grpc.aio.Channel, name: str) -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)).status)


@pytest.fixture
def held(tiny_model: Path, tmp_path: Path) -> Iterator[tuple[JobConfig, Gate, Gate]]:
    """A job with the loss `held`, where it reports that it is computed, and what lets it end."""
    plugin = tmp_path / "held.py"
    with gate(tmp_path / "begun") as begun, gate(tmp_path / "go_on") as go_on:
        plugin.write_text(HELD.format(begun=str(begun.path), go_on=str(go_on.path)))
        sections: dict[str, Any] = {
            "plugins": [str(plugin)],
            "data": {"train_batch_size": 8, "max_prompt_length": 6, "max_response_length": 10},
            "trainer": {"device": "cpu", "default_local_dir": str(tmp_path)},
            "actor": {
                "model": {"path": str(tiny_model)},
                "policy_loss": {"loss_mode": "held"},
                "ppo_mini_batch_size": 8,
                "ppo_micro_batch_size_per_gpu": 4,
            },
        }
        yield make_job(sections), begun, go_on
    forget(str(plugin))


async def test_probes_are_answered_while_a_model_is_trained(
    held: tuple[JobConfig, Gate, Gate], tmp_path: Path
) -> None:
    """Workers compute on threads, and torch releases the interpreter while it does. The update ends after ten
    answers, so a role that computed on its event loop would give none."""
    job, begun, go_on = held
    async with (
        serve_process("actor", job, tmp_path) as role,
        ActorClient([role.address], methods(job)) as actor,
        grpc.aio.insecure_channel(role.health) as channel,
    ):
        await actor.wait_until_ready(120)
        training = asyncio.create_task(actor.update(sequence_batch(8)))
        await begun.passed(training)
        for _ in range(10):
            assert await check(channel, "live") == await check(channel, "actor") == SERVING
        assert not training.done()
        go_on.open()
        await training


async def test_a_call_without_data_outlasts_its_pings() -> None:
    """An update says nothing for minutes, and its client asks every 20 s whether the machine is there. A server
    that did not expect that would hang up at the third time."""
    server = RoleServer({"reward": [REWARD]})
    address = await server.start("127.0.0.1:0")
    often = dict(CLIENT_OPTIONS) | {"grpc.keepalive_time_ms": 600}
    async with grpc.aio.insecure_channel(address, options=list(often.items())) as channel:
        silent = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="live"))
        assert (await silent.read()).status == SERVING
        done, _ = await asyncio.wait({asyncio.ensure_future(silent.code())}, timeout=4)
        assert not done, await silent.debug_error_string()
        silent.cancel()
    await server.drain(0)


async def test_a_process_that_hangs_is_not_live() -> None:
    """Another thread blocks the event loop that serves, as a deadlock would."""
    loop, hangs, free = asyncio.new_event_loop(), threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        free.wait()

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = RoleServer({"reward": [REWARD]})
    address = await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(server.start_health("127.0.0.1:0"), loop)
    )
    with grpc.insecure_channel(address) as channel:
        probe = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service="live")
        assert probe(request).status == SERVING
        loop.call_soon_threadsafe(hang)
        hangs.wait()
        with pytest.raises(grpc.RpcError) as error:
            probe(request, timeout=0.5)
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        free.set()
        assert probe(request, timeout=60).status == SERVING
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(server.drain(0), loop))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def test_a_role_reports_each_state_of_its_life_and_drains(tiny_model: Path, tmp_path: Path) -> None:
    """Loading until the test opens a gate, serving, draining after SIGTERM; alive all the time."""
    names = ("", "reward", "rolemesh.v1.RewardService")
    with gate(tmp_path / "import") as load, gate(tmp_path / "started") as started, gate(tmp_path / "g") as held:
        job = reward_job(tiny_model, tmp_path, started=str(started.path), gate=str(held.path))
        function = tmp_path / "gated.py"
        function.write_text(f"open({str(load.path)!r}).read(1)\n" + function.read_text())
        async with (
            serve_process("reward", job, tmp_path) as role,
            RewardClient([role.address], methods(job), patience_s=0.1) as client,
            grpc.aio.insecure_channel(role.health) as channel,
            grpc.aio.insecure_channel(role.address) as served_at,
        ):

            async def statuses() -> set[int]:
                assert await check(channel, "live") == SERVING
                return {await check(asked, name) for name in names for asked in (channel, served_at)}

            assert await statuses() == {NOT_SERVING}
            with pytest.raises(RoleUnavailable, match=r"still loading|no replica has answered"):
                await client.compute_scores(reward_batch(1))
            with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
                await check(channel, "critic")
            load.open(1)
            await client.wait_until_ready(120)
            assert await statuses() == {SERVING}
            running = asyncio.create_task(client.compute_scores(reward_batch(3)))
            await started.passed(running)
            role.process.send_signal(signal.SIGTERM)
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                if answer.status == NOT_SERVING:
                    break
            assert await statuses() == {NOT_SERVING}
            async with RewardClient([role.address], methods(job), patience_s=0.1) as late:
                with pytest.raises(RoleUnavailable):
                    await late.wait_until_ready(0.1)
                with pytest.raises(RoleUnavailable, match=r"draining|no replica has answered"):
                    await late.compute_scores(reward_batch(1))
            held.open()
            assert (await running)["token_level_scores"].sum(1).tolist() == [0, 1, 2]
            assert await role.process.wait() == 0
