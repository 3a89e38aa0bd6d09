"""RolloutService: protobuf to DataProto and back."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from rolemesh import metrics
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleUnavailable
from rolemesh.roles import Rollout
from rolemesh.rpc.guard import VERSION_KEY
from rolemesh.rpc.streams import receive, send
from rolemesh.v1 import rollout_pb2
from rolemesh.weights.remote import RemoteWeights


class RolloutServicer:
    """Implements RolloutService."""

    def __init__(self, worker: Rollout) -> None:
        self._worker = worker
        self._version = "none"

    async def Generate(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        prompts = await receive(frames)
        self._check_version(context)
        generated = self._worker.generate(prompts)
        async with aclosing(cast(AsyncGenerator[DataProto, None], generated)) as batches:
            async for batch in batches:
                async for frame in send(batch):
                    yield frame

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Any
    ) -> rollout_pb2.UpdateWeightsResponse:
        await self._worker.update_weights(RemoteWeights(request.source, request.version))
        self._version = str(request.version)
        metrics.WEIGHTS_VERSION.labels("rollout").set(request.version)
        return rollout_pb2.UpdateWeightsResponse(version=request.version)

    def _check_version(self, context: Any) -> None:
        """A replica that was restarted holds the model directory's weights. It is as good as gone until the
        client has given it the version in use."""
        expected = dict(context.invocation_metadata() or ()).get(VERSION_KEY)
        if expected is not None and expected != self._version:
            raise RoleUnavailable(f"weights version {expected} is asked for, this replica took {self._version}")
