"""RolloutService: protobuf to DataProto and back."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import cast

from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleUnavailable, WeightsUnavailable
from rolemesh.roles import Rollout
from rolemesh.rpc.metadata import VERSION_KEY
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.servicers import RolloutServiceBase
from rolemesh.services.rollout.worker import RolloutWorker
from rolemesh.telemetry import metrics
from rolemesh.v1 import rollout_pb2
from rolemesh.weights.remote import RemoteWeights
from rolemesh.weights.store import WeightStore

OWN_SHARE = 0.9  # of the caller's deadline, so that an error reaches the caller in time


class RolloutServicer(RolloutServiceBase):
    """Implements RolloutService.

    Args:
        worker: generates responses.
        store: the weights that this process holds; WeightsServicer serves them to others.
    """

    def __init__(self, worker: RolloutWorker, store: WeightStore | None = None) -> None:
        self._worker: Rollout = worker
        self.validator = worker.validator
        self._longest_s = worker.sync_timeout_s  # limits a caller's deadline, because other updates wait
        self._store = store or WeightStore()
        # Names of the version in use ("" before the first update, and while it is uncertain), and of the
        # previous one.
        self._taken = ""
        self._replaced = ""
        self._taking = asyncio.Lock()
        self._on_serving: Callable[[bool], Awaitable[None]] | None = None

    async def watch_serving(self, on_change: Callable[[bool], Awaitable[None]]) -> None:
        """Report, now and at each change, whether a version from UpdateWeights is completely in use."""
        self._on_serving = on_change
        await self._tell_serving()

    async def _tell_serving(self) -> None:
        if self._on_serving is not None:
            await self._on_serving(bool(self._taken))

    async def Generate(self, prompts: DataProto, context: Context) -> AsyncIterator[DataProto]:
        await self._check_version(context)
        generated = self._worker.generate(prompts)
        async with aclosing(cast(AsyncGenerator[DataProto, None], generated)) as batches:
            async for batch in batches:
                yield batch

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: Context
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
        """Fetch a version and swap it in.

        The old version stays in use until the swap, and after a failed fetch. If the caller cancels, a fetch is
        cancelled, but a swap is completed: after half a swap it would be uncertain which weights are in use.
        """
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
        """Record which weights are in use after an update has ended."""
        ended = update.done() and not update.cancelled()
        error = update.exception() if ended else asyncio.CancelledError()
        if error is None:
            self._taken, self._replaced = source.name, self._taken
            metrics.WEIGHTS_SYNC_SECONDS.observe(time.perf_counter() - started)
            metrics.WEIGHTS_VERSION.labels("rollout").set(source.version)
            return
        metrics.WEIGHTS_SYNC_FAILURES.inc(isinstance(error, Exception))
        if source.is_fetched and not isinstance(error, WeightsUnavailable):
            self._taken = ""  # the swap may have failed halfway

    async def _check_version(self, context: Context) -> None:
        """Raise RoleUnavailable unless this replica holds the version that the caller expects.

        A restarted replica holds the model directory's weights. It gets no work until the client has sent it
        the version in use.
        """
        expected = dict(context.invocation_metadata() or ()).get(VERSION_KEY)
        if expected is None or self._serves(expected):
            return
        async with self._taking:  # an update in progress may bring the version
            if not self._serves(expected):
                now = self._taken or "none"
                raise RoleUnavailable(f"expected weights version {expected}; this replica has {now}")

    def _serves(self, expected: str) -> bool:
        """Return whether the replica holds the expected version, or just replaced it.

        A higher version number is not enough: it may be of another run.
        """
        return bool(self._taken) and expected in (self._taken, self._replaced)
