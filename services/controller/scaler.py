"""A role's load, as the controller's clients count its rows: at /metrics, and as KEDA's external scaler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from rolemesh.errors import InvalidConfig
from rolemesh.externalscaler import externalscaler_pb2 as pb
from rolemesh.metrics import ROLE_LOAD_ROWS
from rolemesh.rpc.pool import PendingRows
from services.controller.load import Load

SERVICE = pb.DESCRIPTOR.services_by_name["ExternalScaler"]
METRIC = "pending_rows"
ROLE, TARGET = "role", "pendingPerReplica"  # keys of a trigger's metadata
DEFAULT_TARGET = 64


class ScalerServicer:
    """Implements ExternalScaler. It may be served before there is a client of any role: then nothing waits.

    Args:
        roles: those that the job has.

    Attributes:
        pending: each role's rows; its client is to count them here.
    """

    def __init__(self, roles: Iterable[str]) -> None:
        self.pending = {role: PendingRows() for role in roles}
        self._loads = {role: Load(pending) for role, pending in self.pending.items()}
        for role, load in self._loads.items():
            ROLE_LOAD_ROWS.labels(role).set_function(load.mean)

    def step_began(self) -> None:
        """A step begins now."""
        for load in self._loads.values():
            load.step_began()

    def paused(self) -> None:
        """No step runs, or the next one begins after a pause."""
        for load in self._loads.values():
            load.forget()

    async def IsActive(self, request: pb.ScaledObjectRef, context: Any) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=self.pending[self._role(request)].rows > 0)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Any
    ) -> AsyncIterator[pb.IsActiveResponse]:
        pending = self.pending[self._role(request)]
        while True:
            active = pending.rows > 0
            yield pb.IsActiveResponse(result=active)
            await pending.until(not active)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Any) -> pb.GetMetricSpecResponse:
        self._role(request)
        said = request.scalerMetadata.get(TARGET, str(DEFAULT_TARGET))
        if not said.isdecimal() or not int(said):
            raise InvalidConfig(
                f"the ScaledObject {request.name} has {TARGET} {said!r}; it is to be a number of rows above 0"
            )
        spec = pb.MetricSpec(metricName=METRIC, targetSize=int(said), targetSizeFloat=int(said))
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        rows = self._loads[self._role(request.scaledObjectRef)].mean()
        value = pb.MetricValue(metricName=METRIC, metricValue=round(rows), metricValueFloat=rows)
        return pb.GetMetricsResponse(metricValues=[value])

    def _role(self, scaled: pb.ScaledObjectRef) -> str:
        role: str = scaled.scalerMetadata.get(ROLE, "")
        if role not in self.pending:
            raise InvalidConfig(
                f"the ScaledObject {scaled.name} scales role {role!r}; the job has {', '.join(self.pending)}"
            )
        return role
