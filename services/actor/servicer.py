"""ActorService and ReferenceService: protobuf to DataProto and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rolemesh.dataproto import DataProto
from rolemesh.roles import Actor, Reference
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.servicers import ActorServiceBase, ReferenceServiceBase
from rolemesh.rpc.serving.trained import TrainedServicer
from rolemesh.services.actor.worker import ActorWorker, ReferenceWorker
from rolemesh.telemetry import metrics
from rolemesh.v1 import actor_pb2, checkpoint_pb2
from rolemesh.weights.manifest import check_version
from rolemesh.weights.published import PublishedWeights
from rolemesh.weights.store import WeightStore
from rolemesh.weights.weight_version import WeightVersion


class ActorServicer(TrainedServicer, ActorServiceBase):
    """Implements ActorService."""

    def __init__(self, worker: ActorWorker, store: WeightStore | None = None) -> None:
        super().__init__(worker)
        self._worker: Actor = worker
        self.validator = worker.validator
        self._store = store or WeightStore()
        self._published: WeightVersion | None = None

    async def ComputeLogProbs(self, batch: DataProto, context: Context) -> AsyncIterator[DataProto]:
        yield await self._worker.compute_log_probs(batch)

    async def ComputeRefLogProbs(self, batch: DataProto, context: Context) -> AsyncIterator[DataProto]:
        yield await self._worker.compute_ref_log_probs(batch)

    async def Update(self, batch: DataProto, context: Context) -> checkpoint_pb2.UpdateResponse:
        self._published = None  # the weights change, even if the next version has the same number
        return await super().Update(batch, context)

    async def PublishWeights(
        self, request: actor_pb2.PublishWeightsRequest, context: Context
    ) -> actor_pb2.PublishWeightsResponse:
        check_version(request.version)
        if self._published is None or self._published.version != request.version:
            self._store.clear(f"version {request.version} is being published")  # free its memory first
            self._published = None
            source = await self._worker.publish_weights(request.version)
            assert isinstance(source, PublishedWeights)
            # On a thread: checksums read every byte.
            self._published = await asyncio.to_thread(lambda: source.holding)
            self._store.put(self._published)
        metrics.WEIGHTS_VERSION.labels("actor").set(request.version)
        return actor_pb2.PublishWeightsResponse(version=request.version, digest=self._published.digest)

    async def LoadCheckpoint(
        self, request: checkpoint_pb2.LoadCheckpointRequest, context: Context
    ) -> checkpoint_pb2.LoadCheckpointResponse:
        response = await super().LoadCheckpoint(request, context)
        self._store.clear("a checkpoint was loaded")
        self._published = None
        return response


class ReferenceServicer(ReferenceServiceBase):
    """Implements ReferenceService."""

    def __init__(self, worker: ReferenceWorker) -> None:
        self._worker: Reference = worker
        self.validator = worker.validator

    async def ComputeLogProbs(self, batch: DataProto, context: Context) -> AsyncIterator[DataProto]:
        yield await self._worker.compute_log_probs(batch)
