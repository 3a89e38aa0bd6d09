"""The rollout role in process: checks requests, selects the sampling parameters, and updates the weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial

import torch

from rolemesh.batch_validation import BatchValidator
from rolemesh.config import JobConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import InvalidBatch, InvalidConfig, RolemeshError
from rolemesh.methods import methods
from rolemesh.services.rollout.engines import Engine, load_engine
from rolemesh.services.rollout.engines.fitting import check_fit
from rolemesh.services.rollout.engines.token_rows import check_turns
from rolemesh.services.rollout.rank_engines import CALL, ERROR, RankEngine, SpreadEngine
from rolemesh.telemetry import metrics
from rolemesh.telemetry.timeline import TRANSFER
from rolemesh.weights.local_handoff import LocalWeightHandoff
from rolemesh.weights.weight_source import WeightSource
from rolemesh.workers.commands import on_all_ranks
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.worker_context import WorkerContext


class RolloutWorker(LocalWorker):
    """Implements rolemesh.roles.Rollout.

    Each rank has an engine of its own (rank_engines.py).
    """

    def __init__(self, job: JobConfig, worker_context: WorkerContext | None = None) -> None:
        super().__init__("rollout", worker_context)
        self._sampling = job.rollout.sampling
        self.sync_timeout_s = job.trainer.weight_sync_timeout_s
        self._part = job.engine
        load: Callable[[LocalWorker], Engine] = partial(self._load, job)
        self._own: RankEngine | None = None
        self._spread: SpreadEngine | None = None
        if (size := self.worker_context.ranks.size) > 1:
            self._own = RankEngine(load, self.worker_context, self._part)
            self._spread = SpreadEngine(self._own, self, size)
        self._engine: Engine = self._spread or load(self)
        self.validator = BatchValidator.of(methods(job), "rollout", self._engine.vocabulary)

    def _load(self, job: JobConfig, worker: LocalWorker) -> Engine:
        with self._part.errors_named():
            engine = load_engine(job, worker)
            missing = [name for name in vars(Engine) if name[0] != "_" and not hasattr(engine, name)]
        if missing:
            raise InvalidConfig(
                f"{self._part} should return an Engine (rolemesh.services.rollout.engines); the "
                f"{type(engine).__name__} that it returned lacks {', '.join(missing)}"
            )
        return engine

    @property
    def version(self) -> int:
        """Version of the weights in use; 0: the model directory's."""
        return self._engine.version

    async def generate(self, prompts: DataProto) -> AsyncIterator[DataProto]:
        """Generate one response for each row; yield batches of rows as they finish, with their index in `row`.

        Raises:
            InvalidBatch: prompts are empty or not left-padded, or a row's response so far cannot be continued.
            RoleFailed: the engine's rows differ from the declaration in roles.methods.
        """
        if not len(prompts):
            return
        prompts = self.validator.methods["Generate"].prune(prompts)
        mask = prompts["prompt_mask"].to(torch.int8)
        if not (mask[:, -1:].all() and (mask.diff(dim=1) >= 0).all()):
            raise InvalidBatch(
                "rollout.generate needs left-padded prompts of one token or more; see prompt_mask"
            )
        check_turns(prompts)
        sampling = self._sampling[prompts.meta_info["sampling"]]
        with self.call("generate", prompts) as call:
            async with self.turn(), self.traced("generate", call):
                with call.computing(), self._part.errors_named():
                    async with aclosing(self._engine.generate(prompts, sampling)) as finished:
                        async for rows in finished:
                            self.validator.check_answer("Generate", rows, prompts)  # the engine's contract
                            yield rows

    async def update_weights(self, source: WeightSource) -> None:
        """Fetch a version completely, then swap it in between two decode steps. Idempotent.

        Rows in progress continue with the new weights.

        Raises:
            WeightsUnavailable: the version could not be fetched, or its manifest does not fit this model (then
                no tensor is fetched). The old weights stay in use.
        """
        with self.call("update_weights") as call:
            with call.during(TRANSFER):
                fits = partial(check_fit, source.version, own=self._engine.weights)
                tensors = await source.fetch(fits)
                if self._spread is not None:
                    await self._spread.fetch(source, tensors)
            async with self.turn(), self.traced("update_weights", call):
                with call.computing(), self._part.errors_named():
                    await self._engine.load_weights(source.version, tensors)

    async def sleep(self) -> int:
        with self._part.errors_named():
            return await self._engine.sleep()

    async def wake(self) -> int:
        with self._part.errors_named():
            return await self._engine.wake()

    async def watch(self) -> None:
        with self._part.errors_named():
            await self._engine.watch()

    def close(self) -> None:
        """Wait for the running step to end, then release the engine's resources."""
        super().close()
        self._engine.close()

    # ------------------------------------------------------- of several ranks: what each does

    async def ordered(self, name: str, parts: Sequence[DataProto]) -> list[DataProto]:
        """Run a command on every rank, after the commands before it."""
        return await self.run(getattr(self, name), parts)

    @property
    def rank_engine(self) -> RankEngine:
        """The engine of this rank, if there are several."""
        assert self._own is not None, "a rollout of one rank has no RankEngine"
        return self._own

    @on_all_ranks
    def begin_rows(self, part: DataProto) -> DataProto:
        """Begin to generate this rank's rows of the call in meta_info."""
        if len(part):
            number = part.meta_info[CALL]
            sampling = self._sampling[part.meta_info["sampling"]]
            self.rank_engine.run(self.rank_engine.begin(number, part, sampling))
        return DataProto({})

    @on_all_ranks
    def take_rows(self, part: DataProto) -> DataProto:
        """Return rows that this rank has finished (RankEngine.take)."""
        return self.rank_engine.run(self.rank_engine.take())

    @on_all_ranks
    def end_rows(self, part: DataProto) -> DataProto:
        """End the call in meta_info, whose other rows nobody wants."""
        self.rank_engine.run(self.rank_engine.end(part.meta_info[CALL]))
        return DataProto({})

    @on_all_ranks
    def fetch_weights(self, part: DataProto) -> DataProto:
        """Fetch the version that rank 0 offers, if it offers one. The answer's meta_info may have `error`."""
        if not len(part):
            return DataProto({})
        offered = LocalWeightHandoff(part, self.sync_timeout_s)
        fits = partial(check_fit, offered.version, own=self.rank_engine.engine.weights)
        try:
            self.rank_engine.fetched = self.rank_engine.run(offered.fetch(fits))
        except RolemeshError as error:
            return DataProto({}, meta_info={ERROR: str(error)})
        return DataProto({})

    @on_all_ranks
    def load_weights(self, part: DataProto) -> DataProto:
        """Swap in the version that this rank has fetched."""
        own = self.rank_engine
        version = part.meta_info["version"]
        tensors = own.fetched
        own.fetched = None
        assert tensors is not None, "load_weights comes after fetch_weights"
        own.run(own.engine.load_weights(version, tensors))
        metrics.WEIGHTS_VERSION.labels("rollout").set(version)
        return DataProto({})

    @on_all_ranks
    def offload(self, part: DataProto) -> DataProto:
        """Let this rank's engine sleep. meta_info of the answer: `num_bytes`."""
        return DataProto({}, meta_info={"num_bytes": self.rank_engine.run(self.rank_engine.engine.sleep())})

    @on_all_ranks
    def reload(self, part: DataProto) -> DataProto:
        """Wake this rank's engine. meta_info of the answer: `num_bytes`."""
        return DataProto({}, meta_info={"num_bytes": self.rank_engine.run(self.rank_engine.engine.wake())})

    def silent_s(self) -> float:
        own = self._own.worker.silent_s() if self._own is not None else 0.0
        return max(own, super().silent_s())

    def where_it_computes(self, function: Callable[[], None]) -> None:
        if self._own is None:
            super().where_it_computes(function)
        else:
            self._own.worker.worker_context.thread.submit(function).result()
