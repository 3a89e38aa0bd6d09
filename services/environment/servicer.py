"""EnvironmentService: passes its messages to the worker and back."""

from __future__ import annotations

from rolemesh.errors import RoleBusy
from rolemesh.roles import Environment
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.servicers import EnvironmentServiceBase
from rolemesh.rpc.status_codes import to_status
from rolemesh.services.environment.worker import EnvironmentWorker
from rolemesh.v1.environment_pb2 import (
    ActRequest,
    ActResponse,
    CloseEpisodeRequest,
    CloseEpisodeResponse,
    DescribeRequest,
    DescribeResponse,
    OpenEpisodeRequest,
    OpenEpisodeResponse,
)


class EnvironmentServicer(EnvironmentServiceBase):
    """Implements EnvironmentService."""

    def __init__(self, worker: EnvironmentWorker) -> None:
        self._worker: Environment = worker

    async def Describe(self, request: DescribeRequest, context: Context) -> DescribeResponse:
        return await self._worker.describe(request)

    async def OpenEpisode(self, request: OpenEpisodeRequest, context: Context) -> OpenEpisodeResponse:
        try:
            return await self._worker.open_episode(request)
        except RoleBusy as error:  # the worker itself is full; the guard would take it for another role's
            await context.abort(*to_status(error))
            raise

    async def Act(self, request: ActRequest, context: Context) -> ActResponse:
        return await self._worker.act(request)

    async def CloseEpisode(self, request: CloseEpisodeRequest, context: Context) -> CloseEpisodeResponse:
        return await self._worker.close_episode(request)
