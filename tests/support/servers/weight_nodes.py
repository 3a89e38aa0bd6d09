"""Rollout services on their own ports, their client, and a trained actor that publishes weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from sequences import sequence_batch
from torch import nn

from rolemesh.config.job import JobConfig
from rolemesh.methods import methods
from rolemesh.models.loading import named_weights
from rolemesh.rpc.calling.clients import ActorClient, RolloutClient
from rolemesh.rpc.contract import ACTOR, ROLLOUT, WEIGHTS
from rolemesh.rpc.serving.server import RoleServer
from rolemesh.services.actor.servicer import ActorServicer
from rolemesh.services.actor.worker import ActorWorker
from rolemesh.services.rollout.servicer import RolloutServicer
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.weights.service import WeightsServicer
from rolemesh.weights.store import WeightStore


class Node:
    """A rollout service that can be stopped and restarted on the same port; tests can access its worker."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker, self.address = worker, "127.0.0.1:0"

    async def start(self) -> None:
        self.server = RoleServer({"rollout": [ROLLOUT, WEIGHTS]})
        self.address = await self.server.start(self.address)
        store = WeightStore()
        await self.server.ready({ROLLOUT: RolloutServicer(self.worker, store), WEIGHTS: WeightsServicer(store)})

    async def stop(self) -> None:
        await self.server.drain(0)

    @property
    def model(self) -> nn.Module:
        engine: Any = self.worker._engine
        model: nn.Module = engine.model
        return model


@asynccontextmanager
async def nodes(*workers: RolloutWorker) -> AsyncIterator[list[Node]]:
    async with AsyncExitStack() as stack:
        started = [Node(worker) for worker in workers]
        for node in started:
            await node.start()
            stack.push_async_callback(node.stop)
        yield started


def client(job: JobConfig, *replicas: Node) -> RolloutClient:
    timeouts = {"sync_timeout_s": 20.0, "patience_s": 5.0}
    return RolloutClient([node.address for node in replicas], methods(job), **timeouts)


@asynccontextmanager
async def trained_actor(job: JobConfig) -> AsyncIterator[tuple[ActorClient, ActorWorker]]:
    worker, store = ActorWorker(job), WeightStore()
    server = RoleServer({"actor": [ACTOR, WEIGHTS]})
    address = await server.start("127.0.0.1:0")
    await server.ready({ACTOR: ActorServicer(worker, store), WEIGHTS: WeightsServicer(store)})
    try:
        async with ActorClient([address], methods(job)) as actor:
            await actor.update(sequence_batch(16))
            yield actor, worker
    finally:
        await server.drain(0)


def assert_equal_models(left: nn.Module, right: nn.Module) -> None:
    weights = named_weights(right)
    for name, tensor in named_weights(left).items():
        assert torch.equal(tensor.view(torch.uint8), weights[name].view(torch.uint8)), name
