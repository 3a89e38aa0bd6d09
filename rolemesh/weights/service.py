"""Serves what a process holds to whoever pulls it (weights.proto)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

from rolemesh.errors import InvalidBatch
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
# Between two answers of WatchRegion, each of which wakes every process that maps the region. No more than a
# receiver wants in STALL_S: one that is not told of bytes takes them for bytes that did not come.
WATCH_BYTES = LEAST_BYTES


class WeightsServicer:
    """Implements WeightsService."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def GetManifest(self, request: GetManifestRequest, context: Any) -> GetManifestResponse:
        if not (math.isfinite(request.wait_s) and request.wait_s >= 0):
            raise InvalidBatch(f"wait_s is {request.wait_s}; it is a number of seconds, 0 or more")
        holding = await self._store.get(request.version, request.digest, min(request.wait_s, MAX_WAIT_S))
        return GetManifestResponse(manifest=holding.serialized, shared=holding.region.shared)

    async def FetchRange(self, request: FetchRangeRequest, context: Any) -> AsyncIterator[bytes]:
        holding = await self._store.get(request.version, request.digest)
        at, end = request.offset, request.offset + request.length
        if end > holding.num_bytes:
            raise InvalidBatch(
                f"bytes {at} to {end} of a region of {holding.num_bytes} (weights version {holding.version})"
            )
        sent = metrics.WEIGHTS_SENT_BYTES.labels(holding.role)
        while at < end:
            part = min(end, await holding.beyond(at), at + FRAME_BYTES)
            yield join_frame(None, (holding.region.read(at, part),), part - at)
            sent.inc(part - at)
            at = part

    async def WatchRegion(
        self, request: WatchRegionRequest, context: Any
    ) -> AsyncIterator[WatchRegionResponse]:
        holding = await self._store.get(request.version, request.digest)
        at = holding.num_verified
        yield WatchRegionResponse(num_verified=at)
        while at < holding.num_bytes:
            at = await holding.beyond(min(at + WATCH_BYTES, holding.num_bytes) - 1)
            yield WatchRegionResponse(num_verified=at)
