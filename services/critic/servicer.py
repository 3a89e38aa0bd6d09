"""CriticService: protobuf to DataProto and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rolemesh.roles import Critic
from rolemesh.rpc.streams import receive, send
from rolemesh.v1 import checkpoint_pb2


class CriticServicer:
    """Implements CriticService."""

    def __init__(self, worker: Critic) -> None:
        self._worker = worker

    async def ComputeValues(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        values = await self._worker.compute_values(await receive(frames))
        async for frame in send(values):
            yield frame

    async def Update(self, frames: AsyncIterator[bytes], context: Any) -> checkpoint_pb2.UpdateResponse:
        return checkpoint_pb2.UpdateResponse(metrics=await self._worker.update(await receive(frames)))

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
