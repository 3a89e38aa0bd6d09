"""The replicas of one role, as a client sees them: who is there, who is busy, who is gone for now."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from typing import Any

from rolemesh.errors import InvalidConfig, RolemeshError, RoleUnavailable
from rolemesh.rpc.calling.discovery import Members
from rolemesh.rpc.calling.replica import Replica, wrong_role
from rolemesh.telemetry import metrics

log = logging.getLogger(__name__)

# One piece computes while the next is on its way; more would take choice away from the balancing. Where there
# is no choice there is no limit: a role that shares a device should see all that waits for its turn.
MAX_IN_FLIGHT = 2
MAX_BACKOFF_S = 2.0


class PendingRows:
    """How many rows are pending, and for how long they have been.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.rows = 0
        self._clock = clock
        self._counted_at, self._row_seconds = clock(), 0.0

    @property
    def row_seconds(self) -> float:
        """The integral of `rows` over time: ten rows that are pending for six seconds are 60."""
        return self._row_seconds + self.rows * (self._clock() - self._counted_at)

    def add(self, rows: int) -> None:
        """So many more from now on; below 0: fewer."""
        self._row_seconds, self._counted_at = self.row_seconds, self._clock()
        self.rows += rows


class ReplicaPool:
    """Gives out replicas: the live one with the least outstanding rows first, to calls in the order in which
    they were begun.

    Replicas may join and leave at any time (`follow`). One that joins gets work once it is healthy and
    `on_return` has brought it up to date. One that leaves gets no more; what it computes may end.

    Args:
        role: whose health says that a replica is ready.
        addresses: host:port of each replica that is there from the beginning.
        patience_s: how long a call waits while every replica is gone, before it fails.
        may_grow: others may join, so work is held back for them while those that are there are busy.
        full_rows: outstanding rows with which a replica is full; 0: it is with MAX_IN_FLIGHT calls.
    """

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        *,
        patience_s: float,
        may_grow: bool = False,
        full_rows: int = 0,
    ) -> None:
        self.role = role
        self.replicas = [Replica(address, role) for address in addresses]
        self.on_return: Callable[[Replica], Awaitable[None]] | None = None
        self.waiting = PendingRows()
        self._patience_s, self._may_grow, self._full_rows = patience_s, may_grow, full_rows
        self._is_followed = False
        self._lost: Exception | None = None
        self._leaving: set[Replica] = set()
        self._changed = asyncio.Condition()
        self._line: list[int] = []
        self._handing_out: set[int] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._turns = 0
        self._show_live()

    @property
    def live(self) -> list[Replica]:
        """Those that are not known to be gone."""
        return [replica for replica in self.replicas if replica.live]

    @property
    def addresses(self) -> str:
        return ", ".join(replica.address for replica in self.replicas) or "no address"

    @property
    def has_choice(self) -> bool:
        """Whether work may go to one replica or to another, now or when one has joined."""
        return self._may_grow or len(self.replicas) > 1

    # ------------------------------------------------------------------------ who is there

    def follow(self, members: Members) -> None:
        """From now on the replicas are those that `members` tells of."""
        self._is_followed = True
        self._begin(self._follow(members))

    async def _follow(self, members: Members) -> None:
        try:
            async for addresses in members.watch():
                self._set_members(addresses)
                await self._notify()
        except Exception as error:  # for who waits for a replica
            self._lost = error
            await self._notify()

    def _set_members(self, addresses: Collection[str]) -> None:
        for replica in [r for r in self.replicas if r.address not in addresses]:
            log.info("%s at %s leaves", self.role, replica.address)
            self.replicas.remove(replica)
            self._leaving.add(replica)
            self._let_go(replica)
        for address in sorted(set(addresses) - {replica.address for replica in self.replicas}):
            replica = Replica(address, self.role, live=False)
            self.replicas.append(replica)
            self._begin(self._revive(replica))
        self._show_live()

    def _let_go(self, replica: Replica) -> None:
        """Forgets one that has left, once it has nothing to do."""
        if replica in self._leaving and not replica.in_flight:
            self._leaving.remove(replica)
            if all(replica.address != other.address for other in (*self.replicas, *self._leaving)):
                with suppress(KeyError):  # it never had work
                    metrics.CLIENT_OUTSTANDING_ROWS.remove(self.role, replica.address)
            self._begin(replica.close())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Returns when every replica serves; where replicas come and go, when one does.

        Raises:
            RoleUnavailable: which did not, since when, and what it last said.
            InvalidConfig: a given address is another role's, which no waiting mends.
        """
        since = datetime.now().strftime("%H:%M:%S")
        if self._is_followed:
            async with self.pending(1), self._changed:
                await self._one_is_live(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        problems = await asyncio.gather(*(self._problem_until(replica, deadline) for replica in self.replicas))
        late = [f"at {r.address}: {p}" for r, p in zip(self.replicas, problems, strict=True) if p]
        if late:
            raise RoleUnavailable(
                f"{self.role} was not ready within {timeout_s:g} s (asked since {since}): " + "; ".join(late)
            )

    async def _problem_until(self, replica: Replica, deadline: float) -> str:
        backoff_s = 0.02
        while problem := await self._try_return(replica):
            if problem == wrong_role(self.role):
                raise InvalidConfig(f"{self.role} at {replica.address}: {problem}")
            if time.monotonic() + backoff_s >= deadline:
                return problem
            replica.problem = problem
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, 0.5)
        replica.problem = ""
        return ""

    # ------------------------------------------------------------------------ who gets work

    async def acquire(self, rows: int, turn: int) -> Replica:
        """A live replica for `rows` rows of work, as soon as one has room. Give it back with `release`.

        Args:
            rows: counted as outstanding there.
            turn: the call's place in the line, from `pending`.

        Raises:
            RoleUnavailable: every replica has been gone for `patience_s`.
        """
        async with self._changed:
            self._line.append(turn)
            try:
                while not ((free := self._free()) and turn == min((*self._line, *self._handing_out))):
                    if self.live:
                        await self._changed.wait()
                    else:
                        await self._one_is_live(self._patience_s)
            finally:
                self._line.remove(turn)
                self._changed.notify_all()
            # Ties go to the one whose turn is longest ago.
            chosen = min(free, key=lambda replica: (replica.outstanding_rows, replica.last_turn))
            chosen.last_turn = self._next_turn()
            chosen.in_flight += 1
            self._count_rows(chosen, rows)
            return chosen

    def leave_line(self, turn: int) -> None:
        """All of the call's rows have been handed out."""
        self._handing_out.discard(turn)

    def _next_turn(self) -> int:
        """Later ones are larger."""
        self._turns += 1
        return self._turns

    def _free(self) -> list[Replica]:
        if not self.has_choice:
            return self.live
        if self._full_rows:
            return [replica for replica in self.live if replica.outstanding_rows < self._full_rows]
        return [replica for replica in self.live if replica.in_flight < MAX_IN_FLIGHT]

    async def progress(self, replica: Replica, rows: int) -> None:
        """So many of its rows have been answered, while others are not."""
        self._count_rows(replica, -rows)
        await self._notify()

    async def release(self, replica: Replica, rows: int) -> None:
        """The work is done, or has failed; `rows` were not told to `progress`."""
        replica.in_flight -= 1
        self._count_rows(replica, -rows)
        self._let_go(replica)
        await self._notify()

    @contextmanager
    def holding(self, replica: Replica) -> Iterator[None]:
        """A call to this very replica, whatever room it has. It stays reachable even if it leaves."""
        replica.in_flight += 1
        try:
            yield
        finally:
            replica.in_flight -= 1
            self._let_go(replica)

    async def wait_for_live(self) -> None:
        """Returns when a replica is live. Raises RoleUnavailable after `patience_s`."""
        async with self._changed:
            await self._one_is_live(self._patience_s)

    async def _one_is_live(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait_for(lambda: self.live or self._lost)
        except TimeoutError:
            last = "; ".join(f"at {r.address}: {r.problem}" for r in self.replicas if r.problem)
            at = last or f"at {self.addresses}"
            raise RoleUnavailable(f"{self.role}: no replica answers, since {timeout_s:g} s ({at})") from None
        if self._lost and not self.live:
            raise self._lost

    def _count_rows(self, replica: Replica, rows: int) -> None:
        replica.outstanding_rows += rows
        metrics.CLIENT_OUTSTANDING_ROWS.labels(self.role, replica.address).set(replica.outstanding_rows)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------ how much there is

    @property
    def pending_rows(self) -> int:
        """Of calls that run: those that have no answer yet."""
        return self.waiting.rows

    @asynccontextmanager
    async def pending(self, rows: int) -> AsyncIterator[tuple[int, Callable[[int], None]]]:
        """A call, from its beginning to its end. Gives its place in the line, which it keeps between two of
        its pieces, until `leave_line`; and what is to be told how many rows were answered: the others are
        pending."""
        left, turn = rows, self._next_turn()

        def answered(some: int) -> None:
            nonlocal left
            left -= some
            self._count_pending(-some)

        self._count_pending(rows)
        self._handing_out.add(turn)
        try:
            await self._notify()
            yield turn, answered
        finally:
            self._count_pending(-left)
            self.leave_line(turn)
            await self._notify()

    def _count_pending(self, rows: int) -> None:
        self.waiting.add(rows)
        metrics.CLIENT_PENDING_ROWS.labels(self.role).set(self.waiting.rows)

    # ------------------------------------------------------------------------ gone, and back

    def suspect(self, replica: Replica, problem: str) -> None:
        """Avoids a replica until it is healthy again."""
        if not replica.live or replica not in self.replicas:
            return
        log.warning("%s at %s is avoided until it is healthy: %s", self.role, replica.address, problem)
        replica.live = False
        self._show_live()
        self._begin(self._revive(replica))

    async def _revive(self, replica: Replica) -> None:
        backoff_s = 0.05
        while not replica.live and replica in self.replicas and (problem := await self._try_return(replica)):
            if problem != replica.problem:
                log.info("%s at %s is not used yet: %s", self.role, replica.address, problem)
            replica.problem = problem
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _try_return(self, replica: Replica) -> str:
        """Makes a healthy replica live; else says what is the matter."""
        if problem := await replica.health():
            return problem
        if not replica.live:
            done: Callable[[Replica], Awaitable[None]] | None = None
            while (bring := self.on_return) is not None and bring is not done:  # meanwhile there may be news
                try:
                    await bring(replica)
                    done = bring
                except RolemeshError as error:
                    return str(error)
            log.warning("%s at %s is ready", self.role, replica.address)
            replica.live, replica.problem = True, ""
            self._show_live()
            await self._notify()
        return ""

    def _show_live(self) -> None:
        metrics.REPLICAS_LIVE.labels(self.role).set(len(self.live))

    async def close(self) -> None:
        """Closes every channel; calls that run are cancelled."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in (*self.replicas, *self._leaving)))
