"""The calls that all trained roles have: train, write a checkpoint, load a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.roles import Metrics
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.terms import ControllerTerms
from rolemesh.v1 import checkpoint_pb2


class Trained(Protocol):
    """The methods that workers of all trained roles have."""

    role: str
    job: JobConfig

    async def update(self, batch: DataProto) -> Metrics: ...

    async def begin_checkpoint(self, directory: Path) -> None: ...

    async def finish_checkpoint(self, directory: Path) -> None: ...

    async def load_checkpoint(self, directory: Path | None, num_training_steps: int | None = None) -> None: ...


class TrainedServicer:
    """The base of the servicers of trained roles.

    Args:
        trained: the worker.

    Attributes:
        terms: checks each call's term; rolemesh/rpc/serving/server.py wraps the methods in it.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self.terms = ControllerTerms(trained.role, trained.job.run_dir)

    async def Update(self, batch: DataProto, context: Context) -> checkpoint_pb2.UpdateResponse:
        return checkpoint_pb2.UpdateResponse(metrics=await self._trained.update(batch))

    async def BeginCheckpoint(
        self, request: checkpoint_pb2.BeginCheckpointRequest, context: Context
    ) -> checkpoint_pb2.BeginCheckpointResponse:
        await self._trained.begin_checkpoint(Path(request.directory))
        return checkpoint_pb2.BeginCheckpointResponse()

    async def FinishCheckpoint(
        self, request: checkpoint_pb2.FinishCheckpointRequest, context: Context
    ) -> checkpoint_pb2.FinishCheckpointResponse:
        await self._trained.finish_checkpoint(Path(request.directory))
        return checkpoint_pb2.FinishCheckpointResponse()

    async def LoadCheckpoint(
        self, request: checkpoint_pb2.LoadCheckpointRequest, context: Context
    ) -> checkpoint_pb2.LoadCheckpointResponse:
        directory = Path(request.directory) if request.directory else None
        await self._trained.load_checkpoint(directory, request.num_training_steps or None)
        return checkpoint_pb2.LoadCheckpointResponse()
