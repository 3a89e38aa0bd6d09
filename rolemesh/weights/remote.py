"""A version of the weights, pulled from the process that holds it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import torch
from torch import Tensor

from rolemesh.errors import WeightsUnavailable
from rolemesh.rpc.pool import CLIENT_OPTIONS
from rolemesh.v1.weights_pb2 import FetchRangeRequest, GetManifestRequest, WeightManifest, WeightSpec
from rolemesh.v1.weights_pb2_grpc import WeightsServiceStub
from rolemesh.weights.manifest import check_manifest, checksum, unpack

MAX_RESUMES = 5
RECONNECT_S = 10.0  # how long a holder that went away may take to come back
# How a call ends when its server does: cut, or cancelled by the server's last act.
CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class RemoteWeights:
    """Implements rolemesh.weights.source.WeightSource by pulling from a WeightsService.

    Args:
        address: host:port of the holder.
        version: which one to pull.
        timeout_s: seconds for a whole fetch, with all that is tried again.
    """

    def __init__(self, address: str, version: int, timeout_s: float = 1800.0) -> None:
        self._address, self._version, self._timeout_s = address, version, timeout_s

    @property
    def version(self) -> int:
        return self._version

    @property
    def address(self) -> str | None:
        return self._address

    async def fetch(self) -> dict[str, Tensor]:
        async with grpc.aio.insecure_channel(self._address, options=CLIENT_OPTIONS) as channel:
            pull = _Pull(channel, self._address, self._version, time.monotonic() + self._timeout_s)
            manifest = await pull.manifest()
            # Pages of memory are taken as bytes arrive, not for what the manifest claims.
            region = torch.empty(manifest.region_bytes, dtype=torch.uint8)
            await pull.range(region, 0)
            for spec in await asyncio.to_thread(_damaged, manifest, region):
                await pull.range(_bytes_of(spec, region), spec.offset)
            if damaged := await asyncio.to_thread(_damaged, manifest, region):
                raise WeightsUnavailable(
                    f"weights version {self._version} from {self._address}: checksum of "
                    f"{', '.join(repr(spec.name) for spec in damaged[:5])} is wrong, twice"
                )
        return unpack(manifest, region)


class _Pull:
    """The calls of one fetch, which share a deadline. Whatever fails is WeightsUnavailable."""

    def __init__(self, channel: grpc.aio.Channel, address: str, version: int, deadline: float) -> None:
        self._channel, self._stub = channel, WeightsServiceStub(channel)  # type: ignore[no-untyped-call]
        self._version, self._deadline = version, deadline
        self._what = f"weights version {version} from {address}"

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    async def manifest(self) -> WeightManifest:
        request = GetManifestRequest(version=self._version)
        try:
            answer = await self._stub.GetManifest(request, timeout=self._left_s())
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from error
        check_manifest(answer.manifest, self._version)
        manifest: WeightManifest = answer.manifest
        return manifest

    async def range(self, into: Tensor, offset: int) -> None:
        """Fills a uint8 tensor with the bytes of the region from `offset` on. A stream that is cut goes on
        where it was cut."""
        buffer, received, resumes = into.numpy().data, 0, 0
        while received < len(buffer):
            request = FetchRangeRequest(
                version=self._version, offset=offset + received, length=len(buffer) - received
            )
            try:
                async for part in self._stub.FetchRange(request, timeout=self._left_s()):
                    end = received + len(part.data)
                    if part.offset != offset + received or not part.data or end > len(buffer):
                        raise WeightsUnavailable(
                            f"{self._what}: got {len(part.data)} bytes at {part.offset}, expected up to "
                            f"{len(buffer) - received} at {offset + received}"
                        )
                    buffer[received:end] = part.data
                    received = end
                if received < len(buffer):
                    raise WeightsUnavailable(
                        f"{self._what}: the stream ended after {received} of {len(buffer)} bytes"
                    )
            except grpc.aio.AioRpcError as error:
                resumes += 1
                if error.code() not in CUT or resumes > MAX_RESUMES:
                    raise self._failed(error, f" after {received} of {len(buffer)} bytes") from error
                await self._reconnect(error)

    async def _reconnect(self, error: grpc.aio.AioRpcError) -> None:
        try:
            await asyncio.wait_for(self._channel.channel_ready(), min(RECONNECT_S, self._left_s()))
        except TimeoutError:
            raise self._failed(error) from error

    def _failed(self, error: Any, where: str = "") -> WeightsUnavailable:
        return WeightsUnavailable(f"{self._what}{where}: {error.code().name}: {error.details()}")


def _bytes_of(spec: WeightSpec, region: Tensor) -> Tensor:
    return region[spec.offset : spec.offset + spec.num_bytes]


def _damaged(manifest: WeightManifest, region: Tensor) -> list[WeightSpec]:
    return [spec for spec in manifest.weights if checksum(_bytes_of(spec, region).numpy()) != spec.checksum]
