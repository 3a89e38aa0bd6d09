"""Implements ControllerService: status as protobuf, and pause, resume and stop."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.servicers import ControllerServiceBase
from rolemesh.services.controller.record import ENDED_AT, STEP, Record
from rolemesh.services.controller.service.status import RunStatus
from rolemesh.v1 import controller_pb2 as pb

if TYPE_CHECKING:  # imports torch; the controller's server must start without waiting for it
    from rolemesh.rpc.calling.clients import RoleClient

SERVICE = pb.DESCRIPTOR.services_by_name["ControllerService"]
REPLICAS_EVERY_S = 2.0  # polling interval for replicas, whose changes are not signalled


class ControllerServicer(ControllerServiceBase):
    """Implements ControllerService. It can be served before the run starts and after it ends.

    Args:
        status: the run's status; used on the event loop that serves.
        clients: role to its client; may be filled later.
    """

    def __init__(self, status: RunStatus, clients: Mapping[str, RoleClient] = MappingProxyType({})) -> None:
        self._status = status
        self._clients = clients

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        status = self._status
        return pb.GetStatusResponse(
            job=status.job,
            state=pb.RunState.Name(status.state.value),
            step=status.step,
            total_steps=status.total_steps,
            phase=status.phase,
            found=status.found,
            last=to_message(status.records[-1]) if status.records else None,
            latest=to_message(status.latest).metrics if status.latest else None,
            roles=[pb.Role(name=role, replicas=_replicas(client)) for role, client in self._clients.items()],
        )

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: Context
    ) -> AsyncIterator[pb.WatchStatusResponse]:
        async for _ in self._status.changes(REPLICAS_EVERY_S):
            yield pb.WatchStatusResponse(status=await self.GetStatus(pb.GetStatusRequest(), context))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        async for record in self._status.watch(request.after_step):
            yield pb.WatchResponse(record=to_message(record))

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        self._status.pause()
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        self._status.resume()
        return pb.ResumeResponse()

    async def Stop(self, request: pb.StopRequest, context: Context) -> pb.StopResponse:
        self._status.request_stop()
        return pb.StopResponse()


def _replicas(client: RoleClient) -> list[pb.Replica]:
    return [
        pb.Replica(
            address=replica.address,
            live=replica.live and not replica.problem,
            problem=replica.problem,
            outstanding_rows=replica.outstanding_rows,
        )
        for replica in client.pool.replicas
    ]


def to_message(record: Record) -> pb.StepRecord:
    """Convert a line of metrics.jsonl to protobuf; null (a value that was not finite) becomes NaN."""
    message = pb.StepRecord(step=int(record[STEP] or 0))
    for name, value in record.items():
        if name not in (STEP, ENDED_AT):
            message.metrics[name] = math.nan if value is None else value
    message.ended_at.FromMicroseconds(int((record[ENDED_AT] or 0) * 1e6))
    return message
