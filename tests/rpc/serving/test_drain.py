"""A server that is asked to go: what it has begun it ends, everything else is asked of others, at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rollouts import job_of, prompts_of
from weight_holders import Gated, large, pull, stored

from rolemesh.dataproto import DataProto
from rolemesh.errors import WeightsUnavailable
from rolemesh.methods import methods
from rolemesh.rpc.calling.clients import RolloutClient
from rolemesh.rpc.contract import ROLLOUT, WEIGHTS
from rolemesh.rpc.serving import server as serving_options
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.rollout.servicer import RolloutServicer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights import region
from rolemesh.weights.service import WeightsServicer

LONG_S = 60.0  # a grace in which everything can end
MIB = 1 << 20


class Held(RolloutWorker):
    """The real worker. What it has finished first is given out, and the rest once it is let."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self.begun, self.open = asyncio.Event(), asyncio.Event()
        self.rows: list[int] = []

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        async for batch in super().generate(prompts):
            self.rows += batch["row"].tolist()
            yield batch
            self.begun.set()
            await self.open.wait()


class Noting(Held):
    """It notes when a caller's stream is over, however it ends."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self.over = asyncio.Event()

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        try:
            async for batch in super().generate(prompts):
                yield batch
        finally:
            self.over.set()


async def rows_of(stream: AsyncIterator[DataProto]) -> DataProto:
    answer = DataProto.concat([batch async for batch in stream])
    return answer[answer["row"].argsort()]


@pytest.mark.parametrize("within_the_grace", [True, False])
async def test_a_draining_rollout_loses_no_rows_and_gets_no_new_calls(
    tiny_model: Path, step_by_step: None, within_the_grace: bool
) -> None:
    """It finishes its rows or another replica generates them; new calls go elsewhere at once."""
    job, prompts = job_of(tiny_model), prompts_of(16)
    leaving, staying = Held(job), RolloutWorker(job)
    expected = await rows_of(staying.generate(prompts))
    servers = [RoleServer({"rollout": [ROLLOUT]}) for _ in range(2)]
    addresses = [await server.start("127.0.0.1:0") for server in servers]
    for server, worker in zip(servers, (leaving, staying), strict=True):
        await server.ready({ROLLOUT: RolloutServicer(worker)})
    async with RolloutClient(addresses, methods(job), timeout_s=60) as client:
        call = asyncio.create_task(rows_of(client.generate(prompts)))
        await leaving.begun.wait()
        draining = asyncio.create_task(servers[0].drain(LONG_S if within_the_grace else 0.1))
        await asyncio.sleep(0)
        other = await rows_of(client.generate(prompts))  # while the first one still drains, or has just gone
        assert [replica.live for replica in client.pool.replicas] == [False, True]
        assert not (within_the_grace and draining.done())
        finished_before = len(leaving.rows)
        if within_the_grace:
            leaving.open.set()
        answer = await call
        await draining
    for column in ("row", "responses", "response_mask", "rollout_log_probs"):
        assert torch.equal(answer[column], expected[column])
        assert torch.equal(other[column], expected[column])
    assert (len(leaving.rows) > finished_before) == within_the_grace
    await servers[1].drain(0)


async def test_a_draining_relay_ends_its_transfer_and_refuses_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(region, "CAN_SHARE", False)  # as between two machines: every byte is sent
    held = large()
    relay, actor = Gated(held, until=12 * MIB), WeightsServicer(stored(held))
    async with AsyncExitStack() as stack:
        servers = [RoleServer({"rollout": [WEIGHTS]}), RoleServer({"actor": [WEIGHTS]})]
        addresses = [await server.start("127.0.0.1:0") for server in servers]
        for server, servicer in zip(servers, (relay, actor), strict=True):
            await server.ready({WEIGHTS: servicer})
        stack.push_async_callback(servers[1].drain, 0)
        pulling = asyncio.create_task(pull(addresses, held).fetch())
        await relay.reached.wait()
        draining = asyncio.create_task(servers[0].drain(LONG_S))
        await asyncio.sleep(0)
        second = await pull(addresses, held).fetch()  # of the actor
        assert relay.starts == [0]
        with pytest.raises(WeightsUnavailable, match="rollout is draining"):
            await pull(addresses[:1], held, timeout_s=1).fetch()
        relay.open.set()
        first = await pulling
        await draining
    for tensors in (first, second):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in (await held.fetch()).items())


@asynccontextmanager
async def network(address: str, vanished: asyncio.Event) -> AsyncIterator[str]:
    """A way to an address. Once `vanished` is set it passes nothing on, and closes no connection."""
    host, _, port = address.rpartition(":")
    pumps: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (data := await reader.read(1 << 16)) and not vanished.is_set():
            writer.write(data)
            await writer.drain()
        if vanished.is_set():
            await asyncio.Event().wait()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection(host, int(port))
        pumps.extend(asyncio.create_task(pump(*ends)) for ends in ((reader, ours), (theirs, writer)))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for task in pumps:
            task.cancel()
        await asyncio.wait(pumps)


async def test_a_call_of_a_controller_that_vanishes_ends(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No packet says that it is gone. The times of the server's pings, if it has any, are a twentieth here."""
    quick = [
        (name, value // 20 if value == 20_000 else value) for name, value in serving_options.SERVER_OPTIONS
    ]
    monkeypatch.setattr(serving_options, "SERVER_OPTIONS", quick)
    job, vanished = job_of(tiny_model), asyncio.Event()
    worker, server = Noting(job), RoleServer({"rollout": [ROLLOUT]})
    address = await server.start("127.0.0.1:0")
    await server.ready({ROLLOUT: RolloutServicer(worker)})
    async with (
        network(address, vanished) as way,
        RolloutClient([way], methods(job), timeout_s=600) as controller,
    ):
        call = asyncio.create_task(rows_of(controller.generate(prompts_of(16))))
        await worker.begun.wait()
        vanished.set()
        async with asyncio.timeout(60):
            await worker.over.wait()
        call.cancel()
        await asyncio.wait({call})
    await server.drain(0)
