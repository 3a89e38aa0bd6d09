"""The rollout role in process: checks requests, picks the sampling parameters, keeps the weights current."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial

import torch

from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.door import Door
from rolemesh.errors import InvalidBatch
from rolemesh.roles import methods
from rolemesh.services.rollout.engines import load_engine
from rolemesh.services.rollout.engines.fitting import check_fit
from rolemesh.telemetry.timeline import TRANSFER
from rolemesh.weights.source import WeightSource
from rolemesh.workers.local import LocalWorker


class RolloutWorker(LocalWorker):
    """Implements rolemesh.roles.Rollout."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__("rollout")
        self._sampling = job.rollout.sampling
        self.sync_timeout_s = job.trainer.weight_sync_timeout_s
        self._engine = load_engine(job, self)
        self.door = Door.of(methods(job), "rollout", self._engine.vocabulary)

    @property
    def version(self) -> int:
        """Of the weights in use; 0 is the model directory's."""
        return self._engine.version

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        """One response for each row, in batches of rows as they finish; column `row` says which they are.

        Raises:
            InvalidBatch: prompts are not left-padded.
            RoleFailed: the engine's rows are not what roles.methods declares.
        """
        if not len(prompts):
            return
        prompts = self.door.methods["Generate"].prune(prompts)
        mask = prompts["prompt_mask"].to(torch.int8)
        if not (mask[:, -1:].all() and (mask.diff(dim=1) >= 0).all()):
            raise InvalidBatch("rollout.generate needs left-padded prompts of one token or more: prompt_mask")
        sampling = self._sampling[prompts.meta_info["sampling"]]
        with self.call("generate", prompts) as call:
            async with self.turn(), self.traced("generate", call):
                with call.computing():
                    async with aclosing(self._engine.generate(prompts, sampling)) as finished:
                        async for rows in finished:
                            self.door.check_answer("Generate", rows, prompts)  # the engine keeps its contract
                            yield rows

    async def update_weights(self, source: WeightSource) -> None:
        """Fetches a version whole, then swaps it in between two decode steps: rows that are being made go on
        with it. A version taken twice is the same as once.

        Raises:
            WeightsUnavailable: it could not be had, or its manifest is not of this model, in which case no byte
                of a tensor is asked for; the old weights stay.
        """
        with self.call("update_weights") as call:
            with call.during(TRANSFER):
                fits = partial(check_fit, source.version, own=self._engine.weights)
                tensors = await source.fetch(fits)
            async with self.turn(), self.traced("update_weights", call):
                with call.computing():
                    await self._engine.load_weights(source.version, tensors)

    async def sleep(self) -> int:
        return await self._engine.sleep()

    async def wake(self) -> int:
        return await self._engine.wake()

    async def watch(self) -> None:
        await self._engine.watch()

    def close(self) -> None:
        """Lets the running step end, then gives back what the engine holds."""
        super().close()
        self._engine.close()
