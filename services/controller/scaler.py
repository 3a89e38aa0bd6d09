"""KEDA's external scaler: a role's pending rows, as the controller's clients count them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from rolemesh.errors import InvalidConfig
from rolemesh.externalscaler import externalscaler_pb2 as pb
from rolemesh.rpc.pool import ReplicaPool

SERVICE = pb.DESCRIPTOR.services_by_name["ExternalScaler"]
METRIC = "pending_rows"
ROLE, TARGET = "role", "pendingPerReplica"  # keys of a trigger's metadata
DEFAULT_TARGET = 64


class ScalerServicer:
    """Implements ExternalScaler.

    Args:
        pools: of each role of the job; on the event loop that serves.
    """

    def __init__(self, pools: Mapping[str, ReplicaPool]) -> None:
        self._pools = pools

    async def IsActive(self, request: pb.ScaledObjectRef, context: Any) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=self._pool(request).pending_rows > 0)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: Any
    ) -> AsyncIterator[pb.IsActiveResponse]:
        pool = self._pool(request)
        while True:
            active = pool.pending_rows > 0
            yield pb.IsActiveResponse(result=active)
            await pool.until_pending(not active)

    async def GetMetricSpec(self, request: pb.ScaledObjectRef, context: Any) -> pb.GetMetricSpecResponse:
        self._pool(request)
        said = request.scalerMetadata.get(TARGET, str(DEFAULT_TARGET))
        if not said.isdecimal() or not int(said):
            raise InvalidConfig(
                f"the ScaledObject {request.name} has {TARGET} {said!r}; it is to be a number of rows above 0"
            )
        spec = pb.MetricSpec(metricName=METRIC, targetSize=int(said), targetSizeFloat=int(said))
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        rows = self._pool(request.scaledObjectRef).pending_rows
        value = pb.MetricValue(metricName=METRIC, metricValue=rows, metricValueFloat=rows)
        return pb.GetMetricsResponse(metricValues=[value])

    def _pool(self, scaled: pb.ScaledObjectRef) -> ReplicaPool:
        role = scaled.scalerMetadata.get(ROLE, "")
        if role not in self._pools:
            raise InvalidConfig(
                f"the ScaledObject {scaled.name} scales role {role!r}; the job has {', '.join(self._pools)}"
            )
        return self._pools[role]
