"""The engines of a rollout of several ranks: one on each rank, and all of them as one engine.

The engines compute nothing together. Rank 0 divides the rows of a call among the ranks, and each engine
generates its own. A row's bits do not depend on the engine. Rank 0 speaks to the engines by orders, as to every
worker: it begins and ends calls, and asks for the rows that have finished.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from threading import Thread
from typing import Any, Protocol, TypeVar
from zlib import crc32

import torch
from torch import Tensor

from rolemesh.catalog.engines import EngineSpec
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import RolemeshError, WeightsUnavailable
from rolemesh.ranks.rank_messages import Failure
from rolemesh.rpc.status_codes import BY_NAME
from rolemesh.services.rollout.engines import Engine
from rolemesh.tasks import cancel_all
from rolemesh.weights.local_handoff import handoff_of
from rolemesh.weights.weight_source import WeightSource
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.worker_context import ComputingThread, WorkerContext

R = TypeVar("R")

# Seconds for which a rank waits for a row to finish before it answers that none has. Engine hf hands rows over
# as often (hf.STEPS_S).
WAIT_S = 0.05

# In the meta_info of parts and answers: the number of a call of generate; why it failed; whether it has ended.
CALL = "call"
ERROR = "error"
ENDED = "ended"


class RankEngine:
    """The engine of one rank, for the orders of its role.

    An order ends soon and occupies the role's thread, but calls of an engine last and overlap. So the engine
    has an event loop of its own, and computes on a thread of its own. Orders reach it by `run`.

    Args:
        load: loads the engine, for a worker with a thread on which it may compute.
        worker_context: of the role on this rank.
        part: the engine's declaration, which names its errors.
    """

    def __init__(
        self, load: Callable[[LocalWorker], Engine], worker_context: WorkerContext, part: EngineSpec
    ) -> None:
        self.worker = LocalWorker(
            "rollout", WorkerContext(ComputingThread("engine"), traces=worker_context.traces)
        )
        self.engine = self.worker.worker_context.thread.submit(load, self.worker).result()
        self.fetched: Mapping[str, Tensor] | None = None  # the version to be loaded next
        self._part = part
        self._loop = asyncio.new_event_loop()
        self._calls: dict[int, asyncio.Task[None]] = {}  # which generate, by number
        self._done: deque[tuple[int, DataProto, dict[str, Any]]] = (
            deque()
        )  # what they have made, with meta_info
        self._changed = asyncio.Event()
        self._broken: BaseException | None = None  # an unexpected error of a call
        Thread(target=self._loop.run_forever, daemon=True, name="engine-calls").start()

    def run(self, call: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the engine's event loop, and wait for its result."""

        async def named() -> R:
            with self._part.errors_named():
                return await call

        return asyncio.run_coroutine_threadsafe(named(), self._loop).result()

    async def begin(self, number: int, prompts: DataProto, sampling: SamplingConfig) -> None:
        """Begin a call. Rows that finish are kept until `take`."""
        task = self._calls[number] = asyncio.create_task(self._generate(number, prompts, sampling))
        task.add_done_callback(lambda _: self._end(number))

    async def _generate(self, number: int, prompts: DataProto, sampling: SamplingConfig) -> None:
        try:
            with self._part.errors_named():
                async with aclosing(self.engine.generate(prompts, sampling)) as finished:
                    async for rows in finished:
                        self._put(number, rows)
            self._put(number, DataProto({}), **{ENDED: True})
        except RolemeshError as error:  # the call's, which other calls survive
            failure = Failure.of(error)
            self._put(number, DataProto({}), **{ERROR: [failure.error, failure.text]})

    def _put(self, number: int, made: DataProto, **meta: Any) -> None:
        self._done.append((number, made, meta))
        self._changed.set()

    def _end(self, number: int) -> None:
        task = self._calls.pop(number)
        if not task.cancelled():
            self._broken = task.exception() or self._broken
        self._changed.set()

    async def take(self) -> DataProto:
        """Return what one call has made since it was last asked, after waiting for it for up to WAIT_S seconds.

        Returns:
            rows, with the call's number in meta_info, and, if it has ended, ENDED or its ERROR: class and text.
            Without a number there is nothing.
        """
        if not self._done and self._calls:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    await self._changed.wait()
        if self._broken is not None:
            raise self._broken
        if not self._done:
            return DataProto({})
        number = self._done[0][0]
        together = list[DataProto]()
        meta = dict[str, Any]()
        while self._done and self._done[0][0] == number:
            _, made, more = self._done.popleft()
            together += [made] if len(made) else []
            meta |= more
        rows = DataProto.concat(together) if together else DataProto({})
        return DataProto(rows.tensors, {}, {CALL: number} | meta, rows.num_rows)

    async def end(self, number: int) -> None:
        """End a call, and return once the engine generates nothing for it. No effect on one that has ended."""
        await cancel_all([task for at, task in self._calls.items() if at == number])
        self._done = deque(made for made in self._done if made[0] != number)

    async def watch(self) -> None:
        """As Engine.watch, in another event loop."""
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.engine.watch(), self._loop))

    def close(self) -> None:
        """Release the engine's resources."""
        self.engine.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.worker.close()


class Commands(Protocol):
    """A worker that runs commands on every rank, in the sequence of the calls.

    A command that was asked for runs, even if the caller is cancelled.
    """

    async def ordered(self, name: str, parts: Sequence[DataProto]) -> list[DataProto]: ...


class SpreadEngine:
    """Implements Engine on rank 0, with the engines of all ranks.

    Args:
        own: the engine of rank 0.
        commands: runs commands on every rank, this one included.
        num_ranks: number of ranks.
    """

    def __init__(self, own: RankEngine, commands: Commands, num_ranks: int) -> None:
        self._own = own
        self._commands = commands
        self._num_ranks = num_ranks
        self.vocabulary = own.engine.vocabulary
        self.weights = own.engine.weights
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Queue[tuple[int, DataProto] | Exception]] = {}
        self._collecting: asyncio.Task[None] | None = None
        self._context = contextvars.copy_context()  # of no call

    @property
    def version(self) -> int:
        return self._own.engine.version

    async def generate(self, prompts: DataProto, sampling: SamplingConfig) -> AsyncGenerator[DataProto, None]:
        """Engine.generate. Every rank gets successive rows, so answers to one prompt stay together. A row that
        may be continued goes to the same rank each time, which may have kept its keys and values."""
        number = next(self._numbers)
        sharded = _sharded(prompts, self._num_ranks)
        generating = {rank for rank, rows in enumerate(sharded) if len(rows)}
        parts = [prompts.select_idxs(rows) for rows in sharded]
        for part in parts:
            part.meta_info = {**prompts.meta_info, CALL: number}
        finished = self._calls[number] = asyncio.Queue()
        try:
            await self._order("begin_rows", parts)
            if self._collecting is None or self._collecting.done():
                self._collecting = asyncio.create_task(self._collect(), context=self._context)
            while generating:
                item = await finished.get()
                if isinstance(item, Exception):
                    raise item
                rank, rows = item
                if len(rows):
                    yield DataProto({**rows.tensors, "row": sharded[rank][rows["row"]]})
                if error := rows.meta_info.get(ERROR):
                    raise BY_NAME[error[0]](f"rank {rank}: {error[1]}")
                if rows.meta_info.get(ENDED):
                    generating.remove(rank)
        finally:
            del self._calls[number]
            if generating:
                await self._order("end_rows", self._alike(**{CALL: number}))

    async def _collect(self) -> None:
        """Ask all ranks for finished rows, as long as there are calls."""
        while self._calls:
            try:
                answers = await self._order("take_rows", self._alike())
            except Exception as error:
                for call in self._calls.values():
                    call.put_nowait(error)
                return
            for rank, answer in enumerate(answers):
                if (asked := self._calls.get(answer.meta_info.get(CALL, 0))) is not None:
                    asked.put_nowait((rank, answer))

    async def fetch(self, source: WeightSource, tensors: Mapping[str, Tensor]) -> None:
        """Let every other rank fetch a version that this one has fetched.

        Args:
            source: the version.
            tensors: what it gave to this rank.

        Raises:
            WeightsUnavailable: a rank could not fetch it. No engine's weights have changed.
        """
        offer = handoff_of(source)
        answers = await self._order("fetch_weights", [DataProto({}), *[offer] * (self._num_ranks - 1)])
        for rank, answer in enumerate(answers):
            if why := answer.meta_info.get(ERROR):
                raise WeightsUnavailable(f"rank {rank} of {self._num_ranks} of rollout: {why}")
        self._own.fetched = tensors

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Engine.load_weights, on every rank, after `fetch`."""
        await self._order("load_weights", self._alike(version=version))

    async def sleep(self) -> int:
        return _sum_of_bytes(await self._order("offload", self._alike()))

    async def wake(self) -> int:
        return _sum_of_bytes(await self._order("reload", self._alike()))

    async def watch(self) -> None:
        await self._own.watch()

    def close(self) -> None:
        self._own.close()

    def _alike(self, **meta: Any) -> list[DataProto]:
        return [DataProto({}, meta_info=dict(meta)) for _ in range(self._num_ranks)]

    async def _order(self, name: str, parts: Sequence[DataProto]) -> list[DataProto]:
        # A task of its own, which no caller's end cancels. It queues the order before whatever its caller does
        # next, such as giving the device back.
        return await asyncio.shield(asyncio.ensure_future(self._commands.ordered(name, parts)))


def _sharded(prompts: DataProto, num_ranks: int) -> Sequence[Tensor]:
    """Return the rows of each rank: with `turns` by their prompt and seed, otherwise successive ones."""
    if "turns" not in prompts:
        return torch.arange(len(prompts)).tensor_split(num_ranks)
    columns = [prompts[name].numpy() for name in ("prompts", "prompt_mask", "seeds")]
    ranks = [crc32(b"".join(cell.tobytes() for cell in row)) % num_ranks for row in zip(*columns, strict=True)]
    return [(torch.tensor(ranks) == rank).nonzero()[:, 0] for rank in range(num_ranks)]


def _sum_of_bytes(answers: Sequence[DataProto]) -> int:
    return sum(answer.meta_info["num_bytes"] for answer in answers)
