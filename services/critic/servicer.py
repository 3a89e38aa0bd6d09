"""CriticService: protobuf to DataProto and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rolemesh.dataproto import DataProto
from rolemesh.roles import Critic
from rolemesh.services.critic.worker import CriticWorker
from rolemesh.v1 import checkpoint_pb2


class CriticServicer:
    """Implements CriticService."""

    def __init__(self, worker: CriticWorker) -> None:
        self._worker: Critic = worker
        self.door = worker.door

    async def ComputeValues(self, batch: DataProto, context: Any) -> AsyncIterator[DataProto]:
        yield await self._worker.compute_values(batch)

    async def Update(self, batch: DataProto, context: Any) -> checkpoint_pb2.UpdateResponse:
        return checkpoint_pb2.UpdateResponse(metrics=await self._worker.update(batch))

    async def SaveCheckpoint(
        self, request: checkpoint_pb2.SaveCheckpointRequest, context: Any
    ) -> checkpoint_pb2.SaveCheckpointResponse:
        await self._worker.save_checkpoint(Path(request.directory))
        return checkpoint_pb2.SaveCheckpointResponse()

    async def LoadCheckpoint(
        self, request: checkpoint_pb2.LoadCheckpointRequest, context: Any
    ) -> checkpoint_pb2.LoadCheckpointResponse:
        await self._worker.load_checkpoint(Path(request.directory) if request.directory else None)
        return checkpoint_pb2.LoadCheckpointResponse()
