"""A client's pool of one role's replicas: tracks which are alive and busy, and assigns work to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from typing import Any

from rolemesh.errors import InvalidConfig, RolemeshError, RoleUnavailable
from rolemesh.fingerprint import Fingerprint
from rolemesh.rpc.calling.discovery import Members, follow
from rolemesh.rpc.calling.pending import PendingRows
from rolemesh.rpc.calling.reminder import Reminder
from rolemesh.rpc.calling.replica import Replica, wrong_role
from rolemesh.telemetry import metrics

log = logging.getLogger(__name__)

# One piece computes while the next is in transit; a higher limit would make balancing worse. With only one
# replica there is no limit: a role that shares a device should see all calls that wait for its turn.
MAX_IN_FLIGHT = 2
MAX_BACKOFF_S = 2.0


class ReplicaPool:
    """Assigns replicas to calls, in the order in which calls start.

    A call gets the live replica with the fewest outstanding rows. Replicas may join and leave at any time
    (`follow`). A replica that joins gets work once it is healthy and `on_return` has brought it up to date. A
    replica that leaves gets no more work, but may finish what it has.

    Of several addresses of one server (a pod's IPv4 and IPv6) one gets work. Another takes its place if that
    fails. A trained role has one server: if two answer, every later call raises InvalidConfig.

    Args:
        role: the role whose health is checked.
        addresses: host:port of each initial replica.
        patience_s: seconds that a call waits while no replica is alive, before it fails.
        may_grow: replicas may join, so work is held back for them while the others are busy.
        full_rows: outstanding rows at which a replica is full; 0: it is full with MAX_IN_FLIGHT calls.
        trained: the role has state, so it has one server.
        expected: the fingerprint that replicas must have to get work; None: any.
    """

    def __init__(
        self,
        role: str,
        addresses: Sequence[str],
        *,
        patience_s: float,
        may_grow: bool = False,
        full_rows: int = 0,
        trained: bool = False,
        expected: Fingerprint | None = None,
    ) -> None:
        self.role = role
        self._expected = expected
        self.replicas = [Replica(address, role, expected=expected) for address in addresses]
        self.on_return: Callable[[Replica], Awaitable[None]] | None = None
        self.waiting = PendingRows()
        self._patience_s = patience_s
        self._may_grow = may_grow
        self._full_rows = full_rows
        self._is_followed = False
        self._trained = trained
        self._lost: InvalidConfig | None = None
        self._leaving: set[Replica] = set()
        self._changed = asyncio.Condition()
        self._line: list[int] = []
        self._handing_out: set[int] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._turns = 0
        self._reminder = Reminder(role, lambda: self.replicas)
        self._show_live()

    @property
    def live(self) -> list[Replica]:
        """The replicas that may get work; none after a final error."""
        return [replica for replica in self.replicas if replica.live and not self._lost]

    @property
    def addresses(self) -> str:
        return ", ".join(replica.address for replica in self.replicas) or "no address"

    @property
    def has_choice(self) -> bool:
        """True if there are several servers to choose from, now or after one has joined."""
        num_servers = len({replica.life or replica.address for replica in self.replicas})
        return not self._trained and (self._may_grow or num_servers > 1)

    # ------------------------------------------------------------------------ membership

    def follow(self, members: Members) -> None:
        """Follow the replicas that `members` reports from now on."""
        self._is_followed = True
        self._begin(self._follow(members))

    async def _follow(self, members: Members) -> None:
        async def use(addresses: frozenset[str]) -> None:
            self._set_members(addresses)
            await self._notify()

        try:
            await follow(members, self.role, use)
        except InvalidConfig as error:
            await self._lose(error)

    async def _lose(self, error: InvalidConfig) -> None:
        """Raise the error to every later call, and to those that wait for a replica."""
        log.error("%s", error)
        self._lost = error
        self._show_live()
        await self._notify()

    def _set_members(self, addresses: Collection[str]) -> None:
        for replica in [r for r in self.replicas if r.address not in addresses]:
            log.info("%s at %s left the pool", self.role, replica.address)
            self.replicas.remove(replica)
            self._leaving.add(replica)
            self._let_go(replica)
        for address in sorted(set(addresses) - {replica.address for replica in self.replicas}):
            replica = Replica(address, self.role, live=False, expected=self._expected)
            self.replicas.append(replica)
            self._begin(self._revive(replica))
        self._show_live()

    def _let_go(self, replica: Replica) -> None:
        """Close a replica that has left, once it has no calls."""
        if replica in self._leaving and not replica.in_flight:
            self._leaving.remove(replica)
            if all(replica.address != other.address for other in (*self.replicas, *self._leaving)):
                with suppress(KeyError):  # raised if it never had work
                    metrics.CLIENT_OUTSTANDING_ROWS.remove(self.role, replica.address)
            self._begin(replica.close())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until every replica serves; if members are followed, until one does.

        Raises:
            RoleUnavailable: it took longer than timeout_s; the message has each replica's last problem.
            InvalidConfig: another role serves at a given address, so waiting is of no use.
        """
        since = datetime.now().strftime("%H:%M:%S")
        if self._is_followed:
            async with self.pending(1), self._changed:
                await self._one_is_live(timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        with self._reminder.waiting():
            problems = await asyncio.gather(*(self._problem_until(r, deadline) for r in self.replicas))
        late = [f"at {r.address}: {p}" for r, p in zip(self.replicas, problems, strict=True) if p]
        if late:
            raise RoleUnavailable(
                f"{self.role} was not ready within {timeout_s:g} s (waiting since {since}): " + "; ".join(late)
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

    # ------------------------------------------------------------------------ assigning work

    async def acquire(self, rows: int, turn: int, hint: str = "") -> Replica:
        """Wait for a live replica with room, and reserve rows there. Give it back with `release`.

        Args:
            rows: number of rows, counted as outstanding at the replica.
            turn: the call's place in the queue, from `pending`.
            hint: address of the replica that is chosen if it has room.

        Raises:
            RoleUnavailable: no replica was alive for `patience_s`.
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
            # Ties go to the least recently chosen replica.
            chosen = min(free, key=lambda r: (r.address != hint, r.outstanding_rows, r.last_turn))
            chosen.last_turn = self._next_turn()
            chosen.in_flight += 1
            self._count_rows(chosen, rows)
            return chosen

    def leave_line(self, turn: int) -> None:
        """Leave the queue: all of the call's rows have been handed out."""
        self._handing_out.discard(turn)

    def _next_turn(self) -> int:
        """Return a new turn; later turns are larger."""
        self._turns += 1
        return self._turns

    def _free(self) -> list[Replica]:
        if not self.has_choice:
            return self.live
        if self._full_rows:
            return [replica for replica in self.live if replica.outstanding_rows < self._full_rows]
        return [replica for replica in self.live if replica.in_flight < MAX_IN_FLIGHT]

    async def progress(self, replica: Replica, rows: int) -> None:
        """Count rows of a running call as answered."""
        self._count_rows(replica, -rows)
        await self._notify()

    async def release(self, replica: Replica, rows: int) -> None:
        """Give a replica back after its work is done or has failed; `rows` were not reported to `progress`."""
        replica.in_flight -= 1
        self._count_rows(replica, -rows)
        self._let_go(replica)
        await self._notify()

    @contextmanager
    def holding(self, replica: Replica, rows: int = 0) -> Iterator[None]:
        """Keep a replica reachable within the context, even if it leaves or has no room.

        Args:
            replica: the replica.
            rows: counted as outstanding at it.
        """
        replica.in_flight += 1
        if rows:
            self._count_rows(replica, rows)
        try:
            yield
        finally:
            replica.in_flight -= 1
            if rows:
                self._count_rows(replica, -rows)
            self._let_go(replica)

    async def wait_for_live(self) -> None:
        """Wait until a replica is live. Raise RoleUnavailable after `patience_s`."""
        async with self._changed:
            await self._one_is_live(self._patience_s)

    async def _one_is_live(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                with self._reminder.waiting():
                    await self._changed.wait_for(lambda: self.live or self._lost)
        except TimeoutError:
            last = "; ".join(f"at {r.address}: {r.problem}" for r in self.replicas if r.problem)
            at = last or f"at {self.addresses}"
            raise RoleUnavailable(f"{self.role}: no replica has answered for {timeout_s:g} s ({at})") from None
        if self._lost and not self.live:
            raise self._lost

    def _count_rows(self, replica: Replica, rows: int) -> None:
        replica.outstanding_rows += rows
        metrics.CLIENT_OUTSTANDING_ROWS.labels(self.role, replica.address).set(replica.outstanding_rows)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ------------------------------------------------------------------------ pending work

    @property
    def pending_rows(self) -> int:
        """Rows of running calls that have no answer yet."""
        return self.waiting.rows

    @asynccontextmanager
    async def pending(self, rows: int) -> AsyncIterator[tuple[int, Callable[[int], None]]]:
        """Register a call and its pending rows within the context.

        Yields the call's turn, i.e. its place in the queue, and a function that counts rows as answered. The
        call keeps its place between its pieces, until `leave_line`.
        """
        left = rows
        turn = self._next_turn()

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

    @contextmanager
    def counted(self, rows: int) -> Iterator[None]:
        """Count rows as pending within the context, for calls that take no place in the queue."""
        self._count_pending(rows)
        try:
            yield
        finally:
            self._count_pending(-rows)

    def _count_pending(self, rows: int) -> None:
        self.waiting.add(rows)
        metrics.CLIENT_PENDING_ROWS.labels(self.role).set(self.waiting.rows)

    # ------------------------------------------------------------------------ failure and recovery

    def suspect(self, replica: Replica, problem: str) -> None:
        """Give a replica no work until it is healthy again."""
        if not replica.live or replica not in self.replicas:
            return
        log.warning("%s at %s gets no work until it is healthy: %s", self.role, replica.address, problem)
        replica.live = False
        self._show_live()
        self._begin(self._revive(replica))

    async def _revive(self, replica: Replica) -> None:
        backoff_s = 0.05
        while not (replica.live or self._lost) and replica in self.replicas:
            try:
                problem = await self._try_return(replica)
            except Exception as error:  # it is a problem of this replica, however strange
                problem = f"{type(error).__name__}: {error}"
            if not problem:
                return
            if problem not in (replica.problem, replica.mismatch):  # a mismatch is logged where it is found
                log.info("%s at %s is not used yet: %s", self.role, replica.address, problem)
            replica.problem = problem
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _try_return(self, replica: Replica) -> str:
        """Make a healthy replica live and return ""; else return its problem."""
        problem = await replica.health()
        if self._trained:
            await self._refuse_two(replica)
        if problem or replica.live or self._lost:
            return problem
        if problem := self._used_at(replica):
            return problem
        done: Callable[[Replica], Awaitable[None]] | None = None
        while (bring := self.on_return) is not None and bring is not done:  # it may be replaced meanwhile
            try:
                await bring(replica)
                done = bring
            except RolemeshError as error:
                return str(error)
        if problem := self._used_at(replica):  # now that time has passed
            return problem
        log.warning("%s at %s is ready", self.role, replica.address)
        replica.live = True
        replica.problem = ""
        self._show_live()
        await self._notify()
        return ""

    def _used_at(self, replica: Replica) -> str:
        """Return the problem of a further address of a server that is live at another one; else ""."""
        for other in self.live:
            if self._trained or (replica.life and other.life == replica.life):
                return f"work goes to the same server at {other.address}"
        return ""

    async def _refuse_two(self, replica: Replica) -> None:
        """Raise InvalidConfig to later calls if another replica of a trained role is another server."""
        for other in list(self.replicas):
            if await replica.is_another_server(other) and {replica, other} <= {*self.replicas}:
                where = f"at {other.address} and at {replica.address}"
                what = "scale its workload to 1, then run the same command again"
                await self._lose(
                    InvalidConfig(f"{self.role} has exactly one replica; two answer, {where}; {what}")
                )

    def _show_live(self) -> None:
        metrics.REPLICAS_LIVE.labels(self.role).set(len(self.live))

    async def close(self) -> None:
        """Close every channel; running calls end with RoleFailed."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in (*self.replicas, *self._leaving)))
