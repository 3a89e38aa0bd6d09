"""The lease of a shared device: the roles of a group take turns on it.

At any time at most one role, the resident, is on the device. A call of another role waits until the resident's
calls have ended. Then the resident sleeps and the other role wakes.

Calls of one role run concurrently. A switch costs seconds, so turns are long. New calls of the resident join
its turn for TURN_S seconds even if other roles wait. After that they wait too, and the role whose first call
has waited longest is next. A step therefore needs one switch for each role, and no role starves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Protocol

from rolemesh.errors import RoleFailed, RoleUnavailable
from rolemesh.telemetry import metrics

log = logging.getLogger(__name__)

TURN_S = 60.0


class Member(Protocol):
    """A role that takes turns. If `sleep` raises, the role is still awake; if `wake` raises, still asleep."""

    role: str

    async def sleep(self) -> int:
        """Leave the device, after the role's running work has ended. Return the bytes moved."""
        ...

    async def wake(self) -> int:
        """Return to the device. Return the bytes moved."""
        ...


class Lease:
    """The device of one group, used in one event loop.

    Args:
        turn_s: seconds for which new calls may join a turn while other roles wait.
    """

    def __init__(self, turn_s: float = TURN_S) -> None:
        self.resident: str | None = None
        self._turn_s = turn_s
        self._members: dict[str, Member] = {}
        self._num_running = 0  # calls of the resident
        self._turn_began = 0.0
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # roles in the order of their first call
        self._switch: asyncio.Task[None] | None = None

    def add(self, member: Member) -> None:
        """Add a role that was just loaded and so is on the device. Vacate the device before loading it."""
        assert self.resident is None, f"{member.role} was loaded while {self.resident} was on the device"
        self._members[member.role] = member
        self._set_resident(member.role)

    async def vacate(self) -> None:
        """Put the resident to sleep, if there is one."""
        if self.resident is not None:
            await self._moved("out", self.resident, self._members[self.resident].sleep())
            self._set_resident(None)

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[None]:
        """Wait for the role's turn, and keep the role on the device within the context.

        Raises:
            RoleUnavailable: a rank of the group is gone.
            RoleFailed: the resident could not sleep (it is still on the device), or this role could not wake
                (no role is on the device).
        """
        began = time.monotonic()
        await self._join(role)
        metrics.LEASE_WAIT_SECONDS.labels(role).observe(time.monotonic() - began)
        try:
            yield
        finally:
            self._leave()

    async def _join(self, role: str) -> None:
        is_open = not self._waiting or time.monotonic() < self._turn_began + self._turn_s
        if role == self.resident and self._switch is None and is_open:
            self._admit()
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(role, []).append(admitted)
        self._pass_on()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._withdraw(role, admitted)
            elif admitted.exception() is None:  # admitted and cancelled in the same moment
                self._leave()
            raise

    def _admit(self) -> None:
        if not self._num_running:
            self._turn_began = time.monotonic()
        self._num_running += 1

    def _leave(self) -> None:
        self._num_running -= 1
        self._pass_on()

    def _withdraw(self, role: str, call: asyncio.Future[None]) -> None:
        calls = self._waiting.get(role, [])
        if call in calls:
            calls.remove(call)
            if not calls:
                del self._waiting[role]
        self._pass_on()

    def _pass_on(self) -> None:
        """Admit the waiting calls of the role whose turn it is, or start a switch to it."""
        if self._switch is not None or not self._waiting:
            return
        role = next(iter(self._waiting))
        if role == self.resident:
            for call in self._waiting.pop(role):
                if not call.done():
                    self._admit()
                    call.set_result(None)
            self._pass_on()  # all of them may have been cancelled
        elif not self._num_running:
            # A task of its own: a cancelled caller must not interrupt a switch halfway.
            self._switch = asyncio.create_task(self._switch_to(role))

    async def _switch_to(self, role: str) -> None:
        before = self.resident
        began = time.monotonic()
        try:
            await self.vacate()
            await self._moved("in", role, self._members[role].wake())
            self._set_resident(role)
            seconds = time.monotonic() - began
            metrics.LEASE_SWITCH_SECONDS.labels(before or "none", role).observe(seconds)
            log.info("switched the device from %s to %s in %.3f s", before or "none", role, seconds)
        except Exception as error:
            now = f"{self.resident} is still" if self.resident else "no role is"
            log.exception("%s could not take its turn on the device; %s on it", role, now)
            kind = RoleUnavailable if isinstance(error, RoleUnavailable) else RoleFailed  # a rank is gone
            failed = (
                f"{role} could not take its turn on the device ({now} on it): {type(error).__name__}: {error}"
            )
            for call in self._waiting.pop(role, []):
                if not call.done():
                    call.set_exception(kind(failed))
        finally:
            self._switch = None
            self._pass_on()

    async def _moved(self, direction: str, role: str, moving: Awaitable[int]) -> None:
        metrics.LEASE_SWITCH_BYTES.labels(role, direction).inc(await moving)

    def _set_resident(self, role: str | None) -> None:
        self.resident = role
        for name in self._members:
            metrics.LEASE_RESIDENT.labels(name).set(name == role)
