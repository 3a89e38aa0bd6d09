"""The calls that every trained role serves alike: train, write a checkpoint, load one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics
from rolemesh.v1 import checkpoint_pb2


class Trained(Protocol):
    """What rolemesh.roles.Actor and Critic have in common."""

    async def update(self, batch: DataProto) -> Metrics: ...

    async def begin_checkpoint(self, directory: Path) -> None: ...

    async def finish_checkpoint(self, directory: Path) -> None: ...

    async def load_checkpoint(self, directory: Path | None) -> None: ...


class TrainedServicer:
    """The base of the servicers of trained roles.

    Args:
        trained: does the work.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained

    async def Update(self, batch: DataProto, context: Any) -> checkpoint_pb2.UpdateResponse:
        return checkpoint_pb2.UpdateResponse(metrics=await self._trained.update(batch))

    async def BeginCheckpoint(
        self, request: checkpoint_pb2.BeginCheckpointRequest, context: Any
    ) -> checkpoint_pb2.BeginCheckpointResponse:
        await self._trained.begin_checkpoint(Path(request.directory))
        return checkpoint_pb2.BeginCheckpointResponse()

    async def FinishCheckpoint(
        self, request: checkpoint_pb2.FinishCheckpointRequest, context: Any
    ) -> checkpoint_pb2.FinishCheckpointResponse:
        await self._trained.finish_checkpoint(Path(request.directory))
        return checkpoint_pb2.FinishCheckpointResponse()

    async def LoadCheckpoint(
        self, request: checkpoint_pb2.LoadCheckpointRequest, context: Any
    ) -> checkpoint_pb2.LoadCheckpointResponse:
        await self._trained.load_checkpoint(Path(request.directory) if request.directory else None)
        return checkpoint_pb2.LoadCheckpointResponse()
