"""RolloutService: protobuf to DataProto and back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleUnavailable, WeightsUnavailable
from rolemesh.roles import Rollout
from rolemesh.rpc.metadata import VERSION_KEY
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics
from rolemesh.v1 import rollout_pb2
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.store import WeightStore

OWN_SHARE = 0.9  # of the caller's deadline: what went wrong is to arrive before it


class RolloutServicer:
    """Implements RolloutService.

    Args:
        worker: generates.
        store: what this process holds of the weights; WeightsServicer gives it on.
    """

    def __init__(self, worker: RolloutWorker, store: WeightStore | None = None) -> None:
        self._worker: Rollout = worker
        self.door = worker.door
        self._longest_s = worker.sync_timeout_s  # whatever deadline a caller has: others wait for their turn
        self._store = store or WeightStore()
        # Names of versions: in use ("" before the first, and where that is unsure), and in use before it.
        self._taken, self._replaced = "", ""
        self._taking = asyncio.Lock()
        self._on_serving: Callable[[bool], Awaitable[None]] | None = None

    async def watch_serving(self, on_change: Callable[[bool], Awaitable[None]]) -> None:
        """Tells, now and at each change, whether a version that was told is in use, whole."""
        self._on_serving = on_change
        await self._tell_serving()

    async def _tell_serving(self) -> None:
        if self._on_serving is not None:
            await self._on_serving(bool(self._taken))

    async def Generate(self, prompts: DataProto, context: Any) -> AsyncIterator[DataProto]:
        await self._check_version(context)
        generated = self._worker.generate(prompts)
        async with aclosing(cast(AsyncGenerator[DataProto, None], generated)) as batches:
            async for batch in batches:
                yield batch

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Any
    ) -> rollout_pb2.UpdateWeightsResponse:
        left_s = min(context.time_remaining() or math.inf, self._longest_s)
        source = RemoteWeights(
            request.sources,
            request.version,
            request.digest,
            timeout_s=OWN_SHARE * left_s,
            store=self._store,
        )
        async with self._taking:
            if self._taken != source.name:
                await self._take(source)
        return rollout_pb2.UpdateWeightsResponse(version=request.version)

    async def _take(self, source: RemoteWeights) -> None:
        """The version before stays in use until the swap, and after a failure. When the caller goes, a fetch
        ends, but a swap does not: half-way nobody would know which weights are in use."""
        started = time.perf_counter()
        update = asyncio.create_task(self._worker.update_weights(source))
        try:
            await asyncio.shield(update)
        except asyncio.CancelledError:
            if not source.is_fetched:
                update.cancel()
            await asyncio.wait({update})
            raise
        finally:
            self._settle(update, source, started)
            await self._tell_serving()

    def _settle(self, update: asyncio.Task[None], source: RemoteWeights, started: float) -> None:
        """Which weights are in use now that an update has ended."""
        ended = update.done() and not update.cancelled()
        error = update.exception() if ended else asyncio.CancelledError()
        if error is None:
            self._taken, self._replaced = source.name, self._taken
            metrics.WEIGHTS_SYNC_SECONDS.observe(time.perf_counter() - started)
            metrics.WEIGHTS_VERSION.labels("rollout").set(source.version)
            return
        metrics.WEIGHTS_SYNC_FAILURES.inc(isinstance(error, Exception))
        if source.is_fetched and not isinstance(error, WeightsUnavailable):
            self._taken = ""  # the swap may have broken half-way

    async def _check_version(self, context: Any) -> None:
        """A replica that was restarted holds the model directory's weights. It is as good as gone until the
        client has given it the version in use."""
        expected = dict(context.invocation_metadata() or ()).get(VERSION_KEY)
        if expected is None or self._serves(expected):
            return
        async with self._taking:  # the version may be on its way
            if not self._serves(expected):
                now = self._taken or "none"
                raise RoleUnavailable(f"weights version {expected} is asked for, this replica took {now}")

    def _serves(self, expected: str) -> bool:
        """The version itself, or the one that was swapped in for it while the request was on its way. A higher
        number alone says nothing: it may be another run's."""
        return bool(self._taken) and expected in (self._taken, self._replaced)
