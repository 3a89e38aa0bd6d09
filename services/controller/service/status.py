"""What the run is doing, for whoever asks, and the brakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from enum import Enum

from rolemesh.services.controller.record import STEP, Record
from rolemesh.telemetry.metrics import RUN_STATE


class State(Enum):
    """As in controller.proto."""

    STARTING = 1
    RUNNING = 2
    PAUSED = 3
    STOPPING = 4
    FINISHED = 5
    FAILED = 6


class RunStatus:
    """The state of a run. Used on one event loop.

    Args:
        job: its name.

    Attributes:
        on_change: told after every change of state, phase or records.
        on_step: told when the run begins, and when a step has ended.
        on_pause: told when the run begins to wait, and when it goes on.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self.on_change: Callable[[RunStatus], None] = lambda status: None
        self.on_step: Callable[[], None] = lambda: None
        self.on_pause: Callable[[], None] = lambda: None
        self.total_steps = 0
        self.step = 0
        self.phase = ""
        self.found = ""  # dynamic sampling: how many groups of the step's batch there are
        self.records: list[Record] = []
        self.latest: Record = {}  # the newest value of each metric, whichever step it is of
        self.stop_requested = False
        self._state = State.STARTING
        self._paused = False
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        if self._state is State.RUNNING and self.stop_requested:
            return State.STOPPING
        if self._state is State.RUNNING and self._paused:
            return State.PAUSED
        return self._state

    def set(
        self,
        *,
        state: State | None = None,
        step: int | None = None,
        phase: str | None = None,
        total_steps: int | None = None,
        found: str | None = None,
    ) -> None:
        """Notes what is new."""
        self._state = state or self._state
        self.step = self.step if step is None else step
        self.phase = self.phase if phase is None else phase
        self.total_steps = self.total_steps if total_steps is None else total_steps
        self.found = self.found if found is None else found
        if step is not None:
            self.on_step()
        self._tell()

    def add(self, *records: Record) -> None:
        """Notes records of steps, for `watch`."""
        self.records.extend(records)
        for record in records:
            self.latest |= record
        self._tell()

    def pause(self) -> None:
        """Lets the running step end and begins no other."""
        self._paused = True
        self._tell()

    def resume(self) -> None:
        """Goes on after pause."""
        self._paused = False
        self._tell()

    def request_stop(self) -> None:
        """Lets the running step end, and then the run."""
        self.stop_requested = True
        self._tell()

    async def may_begin(self) -> bool:
        """Waits while paused; False when the run is to end."""
        if self._paused and not self.stop_requested:
            self.on_pause()
            await self._until(lambda: self.stop_requested or not self._paused)
            self.on_pause()
        return not self.stop_requested

    async def watch(self, after_step: int = 0) -> AsyncIterator[Record]:
        """Records of steps after `after_step` (0: of all, also of the validation before step 1): those there
        are, then each as it is made, to the run's end."""
        seen = 0
        while not (self._ended and seen == len(self.records)):
            if seen == len(self.records):
                await self._changed.wait()
            new, seen = self.records[seen:], len(self.records)
            for record in new:
                if after_step == 0 or (record[STEP] or 0) > after_step:
                    yield record

    async def changes(self, every_s: float) -> AsyncIterator[None]:
        """Now, after each change (once for several at a time), and at least so often; the last one is the end
        of the run."""
        ended = False
        while not ended:
            ended, changed = self._ended, self._changed
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if ended else every_s):
                    await changed.wait()

    @property
    def _ended(self) -> bool:
        return self._state in (State.FINISHED, State.FAILED)

    def _tell(self) -> None:
        for state in State:
            RUN_STATE.labels(state.name.lower()).set(state is self.state)
        self.on_change(self)
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()
