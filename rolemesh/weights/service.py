"""Serves a held version to whoever pulls it (weights.proto)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from rolemesh.errors import WeightsUnavailable
from rolemesh.v1.weights_pb2 import (
    FetchRangeRequest,
    FetchRangeResponse,
    GetManifestRequest,
    GetManifestResponse,
)
from rolemesh.v1.weights_pb2_grpc import WeightsServiceServicer
from rolemesh.weights.held import HeldWeights

PART_BYTES = 1 << 20


class WeightsServicer(WeightsServiceServicer):
    """Implements WeightsService.

    Args:
        get: the version that is held now, or None.
    """

    def __init__(self, get: Callable[[], HeldWeights | None]) -> None:
        self._get = get

    async def GetManifest(self, request: GetManifestRequest, context: Any) -> GetManifestResponse:
        held = self._held(request.version)
        # On a thread: checksums read every byte.
        return GetManifestResponse(manifest=await asyncio.to_thread(lambda: held.manifest))

    async def FetchRange(self, request: FetchRangeRequest, context: Any) -> AsyncIterator[FetchRangeResponse]:
        held, offset = self._held(request.version), request.offset
        await asyncio.to_thread(lambda: held.manifest)
        for data in held.read(offset, request.length, PART_BYTES):
            yield FetchRangeResponse(offset=offset, data=data)
            offset += len(data)

    def _held(self, version: int) -> HeldWeights:
        held = self._get()
        if held is None or held.version != version:
            now = "none is held" if held is None else f"version {held.version} is held"
            raise WeightsUnavailable(f"weights version {version} is not held here; {now}")
        return held
