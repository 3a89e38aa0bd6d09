"""Serves the weights that a process holds to processes that pull them (weights.proto)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator

from rolemesh.errors import InvalidBatch
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.servicers import WeightsServiceBase
from rolemesh.telemetry import metrics
from rolemesh.v1.weights_pb2 import (
    FetchRangeRequest,
    GetManifestRequest,
    GetManifestResponse,
    WatchRegionRequest,
    WatchRegionResponse,
)
from rolemesh.weights.remote import LEAST_BYTES
from rolemesh.weights.store import WeightStore
from rolemesh.wire.carrier import FRAME_BYTES
from rolemesh.wire.frame import join_frame

MAX_WAIT_S = 30.0
# Bytes between two answers of WatchRegion; each answer wakes every process that maps the region. It must not
# exceed what a receiver expects in STALL_S, because a receiver counts unreported bytes as missing.
WATCH_BYTES = LEAST_BYTES


class WeightsServicer(WeightsServiceBase):
    """Implements WeightsService."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def GetManifest(self, request: GetManifestRequest, context: Context) -> GetManifestResponse:
        if not (math.isfinite(request.wait_s) and request.wait_s >= 0):
            raise InvalidBatch(f"wait_s is {request.wait_s}; expected a number of seconds, 0 or more")
        holding = await self._store.get(request.version, request.digest, min(request.wait_s, MAX_WAIT_S))
        if holding.striped:
            return GetManifestResponse(manifest=holding.serialized, striped=holding.striped.message())
        return GetManifestResponse(manifest=holding.serialized, shared=holding.region.shared)

    async def FetchRange(self, request: FetchRangeRequest, context: Context) -> AsyncIterator[bytes]:
        holding = await self._store.get(request.version, request.digest)
        at = request.offset
        end = request.offset + request.length
        if end > holding.num_bytes:
            raise InvalidBatch(
                f"asked for bytes {at} to {end} of weights version {holding.version}, which has "
                f"{holding.num_bytes} bytes"
            )
        if holding.striped:
            holding.striped.check(at, end)
        sent = metrics.WEIGHTS_SENT_BYTES.labels(holding.role)
        while at < end:
            part = min(end, await holding.beyond(at), at + FRAME_BYTES)
            yield join_frame(None, (holding.region.read(at, part),), part - at)
            sent.inc(part - at)
            at = part

    async def WatchRegion(
        self, request: WatchRegionRequest, context: Context
    ) -> AsyncIterator[WatchRegionResponse]:
        holding = await self._store.get(request.version, request.digest)
        if holding.striped:
            raise InvalidBatch(f"weights version {holding.version} is striped: no region has all of it")
        at = holding.num_verified
        yield WatchRegionResponse(num_verified=at)
        while at < holding.num_bytes:
            at = await holding.beyond(min(at + WATCH_BYTES, holding.num_bytes) - 1)
            yield WatchRegionResponse(num_verified=at)
