"""Generation ahead of the steps: while the roles train on step k, the rollouts answer the prompts of the next
ones with the weights that they have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import torch

from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleFailed
from rolemesh.roles import Rollout
from rolemesh.tasks import closed_at_end
from rolemesh.telemetry import context
from rolemesh.weights.source import WeightSource


class Ahead:
    """Implements rolemesh.roles.Rollout around the run's: a page need not know how long ago its rows were
    begun. Weights pass through at once, also while rows of later steps are being made.

    When step k asks for its rows, the weights are version k − 1, and rows up to those of step
    k + max_staleness are begun. So step k learns from tokens of the versions k − 1 − max_staleness to k − 1.

    Args:
        rollout: generates.
        upcoming: the rows of a step for a sampling ("train", "greedy"); None where it will not be made. Who
            asks for the rows of one step is taken to ask for those of the next ones too.
        max_staleness: in steps. With 0 rows are begun when their step asks for them.
    """

    def __init__(
        self, rollout: Rollout, upcoming: Callable[[int, str], DataProto | None], max_staleness: int
    ) -> None:
        self._rollout, self._upcoming, self._max_staleness = rollout, upcoming, max_staleness
        self._begun: dict[tuple[int, str], _Generation] = {}
        self._version = 0

    async def generate(self, prompts: DataProto) -> AsyncGenerator[DataProto]:
        """The rows that were begun for this step, each once, and the error if there was one: it is raised in
        the step that needs the rows. Validation is not ahead: the weights of now answer it.

        Raises:
            RoleFailed: a token was made by weights that were not in use.
        """
        if prompts.meta_info["sampling"] == "validation":
            current = range(self._version, self._version + 1)
            generation = _Generation(self._rollout, prompts, current, context.step.get())
        else:
            generation = self._of_step(prompts.meta_info["step"], prompts.meta_info["sampling"], prompts)
        try:
            while (rows := await generation.next()) is not None:
                yield rows
        finally:
            await generation.end()

    async def update_weights(self, source: WeightSource) -> None:
        await self._rollout.update_weights(source)
        self._version = source.version

    async def aclose(self) -> None:
        """Ends what no step has asked for."""
        for generation in self._begun.values():
            await generation.end()

    def _of_step(self, number: int, sampling: str, prompts: DataProto) -> _Generation:
        """The generation of the step that asks for its rows; those of the steps after it are begun."""
        self._begin(number, sampling, prompts)
        for later in range(number + 1, number + 1 + self._max_staleness):
            self._begin(later, sampling, self._upcoming(later, sampling))
        rows = self._begun[number, sampling].rows
        assert all(torch.equal(rows[name], prompts[name]) for name in ("seeds", "prompts")), (
            f"step {number} asks for other rows than were begun for it"
        )
        return self._begun.pop((number, sampling))

    def _begin(self, number: int, sampling: str, rows: DataProto | None) -> None:
        if (number, sampling) not in self._begun and rows is not None:
            versions = range(max(0, number - 1 - self._max_staleness), number)
            self._begun[number, sampling] = _Generation(self._rollout, rows, versions, number)


class _Generation:
    """Rows in the making; those that are finished wait here until they are asked for.

    Args:
        rollout: makes them.
        rows: what it is asked.
        versions: of the weights that may have made a token.
        step: for which they are made, in the roles' logs.
    """

    def __init__(self, rollout: Rollout, rows: DataProto, versions: range, step: int) -> None:
        self.rows = rows
        self._versions = versions
        self._finished: asyncio.Queue[DataProto | None] = asyncio.Queue()  # never more than `rows`
        self._task = asyncio.create_task(self._generate(rollout, step))
        self._task.add_done_callback(lambda _: self._finished.put_nowait(None))

    async def next(self) -> DataProto | None:
        """Some finished rows; None after the last. Raises what ended the generation before."""
        rows = await self._finished.get()
        if rows is None:
            await self._task
        return rows

    async def end(self) -> None:
        """Returns when nothing is being made any more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _generate(self, rollout: Rollout, step: int) -> None:
        context.step.set(step)  # a task has a context of its own
        stream = rollout.generate(self.rows)
        async with closed_at_end(stream):
            async for rows in stream:
                self._check_versions(rows, step)
                self._finished.put_nowait(rows)

    def _check_versions(self, rows: DataProto, step: int) -> None:
        made_by = rows["weight_versions"][rows["response_mask"]]
        if strange := set(made_by.unique().tolist()) - set(self._versions):
            raise RoleFailed(
                f"rollout: tokens for step {step} were made by weights {sorted(strange)}; in use are versions "
                f"{self._versions.start} to {self._versions.stop - 1}"
            )
