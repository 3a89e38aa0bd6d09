"""The status of a run, and its pause and stop switches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from enum import Enum

from rolemesh.errors import RoleUnavailable
from rolemesh.services.controller.record import STEP, Record
from rolemesh.telemetry.metrics import RUN_STATE, STEP_ENDED


class State(Enum):
    """State of a run; the values are RunState's in controller.proto."""

    STARTING = 1
    RUNNING = 2
    PAUSED = 3
    STOPPING = 4
    FINISHED = 5
    FAILED = 6


class RunStatus:
    """The status of a run. Use it on one event loop.

    Args:
        job: the job's name.

    Attributes:
        on_change: called after every change of state, phase or records.
        on_step: called when the run starts, and when a step has ended.
        on_pause: called when the run pauses, and when it continues.
        may_go_on: returns whether the run is started anew if a role is lost now and no stop was requested.
    """

    def __init__(self, job: str) -> None:
        self.job = job
        self.on_change: Callable[[RunStatus], None] = lambda status: None
        self.on_step: Callable[[], None] = lambda: None
        self.on_pause: Callable[[], None] = lambda: None
        self.may_go_on: Callable[[], bool] = lambda: False
        self.total_steps = 0
        self.step = 0
        self.phase = ""
        self.found = ""  # dynamic sampling: how many groups of the step's batch have been found
        self.records: list[Record] = []
        self.latest: Record = {}  # the newest value of each metric, from any step
        self.stop_requested = False
        self._state = State.STARTING
        self._paused = False
        self._changed = asyncio.Event()
        self._show_state()

    @property
    def state(self) -> State:
        if self._state is State.RUNNING and self.stop_requested:
            return State.STOPPING
        if self._state is State.RUNNING and self._paused:
            return State.PAUSED
        return self._state

    @property
    def goes_on(self) -> bool:
        """True if the run is started anew should a role be lost now; never after a request to stop."""
        return not self.stop_requested and self.may_go_on()

    def set(
        self,
        *,
        state: State | None = None,
        step: int | None = None,
        phase: str | None = None,
        total_steps: int | None = None,
        found: str | None = None,
    ) -> None:
        """Update the given fields, and notify watchers."""
        self._state = state or self._state
        self.step = self.step if step is None else step
        self.phase = self.phase if phase is None else phase
        self.total_steps = self.total_steps if total_steps is None else total_steps
        self.found = self.found if found is None else found
        if step is not None:
            self.on_step()
        self._notify()

    def fail(self, error: BaseException) -> None:
        """Set FAILED; or STARTING if a role was lost and the run goes on by itself."""
        lost = isinstance(error, RoleUnavailable | asyncio.CancelledError)
        self.set(state=State.STARTING if lost and self.goes_on else State.FAILED)

    def add(self, *records: Record) -> None:
        """Add records of steps, and notify watchers."""
        self.records.extend(records)
        for record in records:
            self.latest |= record
        self._notify()

    def pause(self) -> None:
        """Pause after the current step."""
        self._paused = True
        self._notify()

    def resume(self) -> None:
        """Continue after a pause."""
        self._paused = False
        self._notify()

    def request_stop(self) -> None:
        """End the run after the current step."""
        self.stop_requested = True
        self._notify()

    async def may_begin(self) -> bool:
        """Wait while paused, then return whether the next step may start; False if a stop was requested."""
        if self._paused and not self.stop_requested:
            self.on_pause()
            await self._until(lambda: self.stop_requested or not self._paused)
            STEP_ENDED.set_to_current_time()  # or the next step would seem to have begun before the pause
            self.on_pause()
        return not self.stop_requested

    async def watch(self, after_step: int = 0) -> AsyncIterator[Record]:
        """Yield records of steps after `after_step`: existing ones, then each new one, until the run ends.

        0: records of all steps, also of the validation before step 1.
        """
        seen = 0
        while not (self._ended and seen == len(self.records)):
            if seen == len(self.records):
                await self._changed.wait()
            new = self.records[seen:]
            seen = len(self.records)
            for record in new:
                if after_step == 0 or (record[STEP] or 0) > after_step:
                    yield record

    async def changes(self, every_s: float) -> AsyncIterator[None]:
        """Yield at once, after each change, and at least every `every_s` seconds.

        Simultaneous changes yield once. The last time is after the run's end.
        """
        ended = False
        while not ended:
            ended = self._ended
            changed = self._changed
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if ended else every_s):
                    await changed.wait()

    @property
    def _ended(self) -> bool:
        return self._state in (State.FINISHED, State.FAILED)

    def _notify(self) -> None:
        self._show_state()
        self.on_change(self)
        before = self._changed
        self._changed = asyncio.Event()
        before.set()

    def _show_state(self) -> None:
        for state in State:
            RUN_STATE.labels(state.name.lower()).set(state is self.state)

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()
