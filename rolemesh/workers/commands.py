"""Commands: methods of a worker that every rank of its role runs, each on its own rows.

A public method of a worker runs on rank 0 alone. It divides its rows among the ranks, runs a command on all of
them, and gathers the answers. With one rank, a command is a plain call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.models.micro_batches import IS_FILLER, MicroBatches
from rolemesh.ranks.rank_load import RankLoads
from rolemesh.ranks.ranks import Ranks
from rolemesh.telemetry import timeline
from rolemesh.telemetry.logs import drop_frames
from rolemesh.workers import broken_device
from rolemesh.workers.worker_context import WorkerContext

SECONDS = "seconds"  # in an answer's meta_info: of the whole command, and of its collectives


class RunsOnAllRanks(Protocol):
    """A worker whose commands run on every rank."""

    role: str
    worker_context: WorkerContext
    loads: RankLoads


W = TypeVar("W", bound=RunsOnAllRanks)
# A command as rank 0 calls it: a part for each rank, to an answer of each.
OnAllRanks = Callable[[W, Sequence[DataProto]], list[DataProto]]


def on_all_ranks(method: Callable[[W, DataProto], DataProto]) -> OnAllRanks[W]:
    """Make a worker's method a command.

    The method takes one rank's rows, with its parameters in meta_info, and returns that rank's answer. Called
    on rank 0, on the worker's thread, the command takes the parts of all ranks and returns all answers. The
    method itself, which the other ranks run, is available as `method.__wrapped__`; its answers say how long it
    took, and its errors keep no tensor on the device.
    """

    def run(self: W, part: DataProto) -> DataProto:
        try:
            return method(self, part)
        except BaseException as error:
            broken_device.report(error, self.role)  # before rank 0 has waited for the other ranks
            drop_frames(error)
            raise

    @functools.wraps(method)
    def timed(self: W, part: DataProto) -> DataProto:
        ranks = self.worker_context.ranks
        began = time.perf_counter()
        ranks.clock.take()  # of what ran between commands
        answer = run(self, part)
        waited = ranks.clock.take()
        answer.meta_info = {**answer.meta_info, SECONDS: [time.perf_counter() - began, waited]}
        return answer

    def run_on_all(self: W, parts: Sequence[DataProto]) -> list[DataProto]:
        if self.worker_context.ranks.size == 1:
            return [run(self, part) for part in parts]
        began = time.perf_counter()
        answers = self.worker_context.executor.run(method.__name__, functools.partial(timed, self), parts)
        if all(SECONDS in answer.meta_info for answer in answers):
            seconds = [(whole, waited) for whole, waited in (each.meta_info.pop(SECONDS) for each in answers)]
            self.loads.add([_num_tokens(part, self.worker_context.ranks) for part in parts], seconds)
            timeline.add_ranks(began, seconds)
        return answers

    functools.update_wrapper(run_on_all, method)
    run_on_all.__wrapped__ = timed  # type: ignore[attr-defined]
    run_on_all.is_command = True  # type: ignore[attr-defined]
    return run_on_all


def _num_tokens(part: DataProto, ranks: Ranks) -> int:
    """Return the number of tokens of its part that a rank computes."""
    return 0 if part.meta_info.get(IS_FILLER) else timeline.sizes_of(part).get("tokens", 0) // ranks.sharing


def command_of(worker: object, name: str) -> Callable[[DataProto], DataProto]:
    """Return the method that a rank runs for a command.

    Raises:
        LookupError: the worker has no such command.
    """
    command: Any = getattr(type(worker), name, None)
    if not getattr(command, "is_command", False):
        raise LookupError(f"{type(worker).__name__} has no command {name!r}")
    return functools.partial(command.__wrapped__, worker)


@dataclass(frozen=True)
class ShardedBatch:
    """The rows of a batch, divided among the ranks.

    Args:
        rows: the rows of each part, ascending. A part may have none.
        parts: what each rank gets: a part's rows, or another row that does not count.
        sharing: how many ranks in succession get the same part.
    """

    rows: list[Tensor]
    parts: list[DataProto]
    sharing: int

    @classmethod
    def of(cls, batch: DataProto, micro_batches: MicroBatches, ranks: Ranks, **meta: Any) -> ShardedBatch:
        """Divide a batch, with the same parameters for every rank.

        Raises:
            InvalidBatch: a row has more tokens than a micro-batch may have.
        """
        num_parts = ranks.size // ranks.sharing
        rows = micro_batches.shard(batch, num_parts) if num_parts > 1 else [torch.arange(len(batch))]
        return cls._of_rows(batch, rows, ranks, meta)

    @classmethod
    def evenly(cls, batch: DataProto, ranks: Ranks) -> ShardedBatch:
        """Divide a batch of any columns in equal numbers of rows."""
        num_parts = ranks.size // ranks.sharing
        return cls._of_rows(batch, list(torch.arange(len(batch)).tensor_split(num_parts)), ranks, {})

    @classmethod
    def _of_rows(
        cls, batch: DataProto, rows: list[Tensor], ranks: Ranks, meta: Mapping[str, Any]
    ) -> ShardedBatch:
        if len(rows) == 1:
            parts = [DataProto(batch.tensors, batch.non_tensors, dict(meta), len(batch))]
        else:
            parts = [batch.select_idxs(at if len(at) else torch.tensor([0])) for at in rows]
            for part, at in zip(parts, rows, strict=True):
                part.meta_info = {**meta, IS_FILLER: not len(at)}
        sharing = ranks.size // len(rows)
        return cls(rows, [part for part in parts for _ in range(sharing)], sharing)

    def by_part(self, answers: Sequence[DataProto]) -> Sequence[DataProto]:
        """Return one answer for each part: ranks with the same part answer alike."""
        return answers[:: self.sharing]

    def gather(self, answers: Sequence[DataProto]) -> DataProto:
        """Put the rows of all ranks' answers back into the order of the batch."""
        answers = self.by_part(answers)
        if len(answers) == 1:
            return answers[0]
        having = [answer for answer, at in zip(answers, self.rows, strict=True) if len(at)]
        return DataProto.concat(having).select_idxs(torch.cat(self.rows).argsort())
