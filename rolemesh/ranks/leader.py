"""The leader, rank 0, runs the methods of all its roles on its followers: it serves GroupService to them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import grpc

from rolemesh.dataproto import DataProto
from rolemesh.errors import NotPermitted, RolemeshError, RoleUnavailable
from rolemesh.ranks.executor import Command, RankExecutor
from rolemesh.ranks.rank_messages import (
    KEEPALIVE,
    LEADER_KEY,
    REMIND_S,
    RPC,
    Failure,
    Order,
    RankAnswer,
    last,
)
from rolemesh.ranks.rendezvous import Rendezvous
from rolemesh.rpc import tls
from rolemesh.rpc.metadata import RANK_KEY, SECRET_KEY
from rolemesh.rpc.serving.access import Permissions
from rolemesh.rpc.serving.bounded import Bounded
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.serving.server import HANDLERS, SERVER_OPTIONS
from rolemesh.rpc.status_codes import to_status
from rolemesh.telemetry import context as origin
from rolemesh.wire.codec import Encoded
from rolemesh.wire.streams import CARRIER, receive_batches

log = logging.getLogger(__name__)

# After a rank's error the other ranks may take this long to raise the same one. A rank that is silent by then
# probably waits, in a collective, for the rank that failed.
OTHERS_S = 10.0
CLOSE_S = 5.0  # for followers to end their streams when rank 0 drains


@dataclass(eq=False)
class _PendingOrder:
    """An order that some rank has not answered yet."""

    order: Order
    answers: Future[list[DataProto]] = field(default_factory=Future)
    outcomes: dict[int, DataProto | Failure] = field(default_factory=dict)  # by rank, in order of arrival
    own_error: Exception | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.order.role}.{self.order.method} (order {self.order.number})"


class Leader:
    """Sends the orders of rank 0 to its followers. Used in one event loop.

    Args:
        roles: of the process.
        rendezvous: where its ranks meet.
    """

    def __init__(self, roles: Sequence[str], rendezvous: Rendezvous) -> None:
        self.size = rendezvous.size
        self.rendezvous = rendezvous
        self._roles = tuple(roles)
        self._loop = asyncio.get_running_loop()
        self._secret = secrets.token_hex(32)
        self._outboxes: dict[int, asyncio.Queue[Encoded | None]] = {}  # by rank of the follower
        self._all_follow = asyncio.Event()
        self._pending: dict[str, _PendingOrder] = {}  # by role: a role's thread has one at a time
        self._is_closing = False
        self._lost: asyncio.Future[None] = self._loop.create_future()
        permissions = [Permissions({RPC.path: RPC}, {RPC.service: roles[0]})] if tls.current_keys() else []
        options = [*(dict(SERVER_OPTIONS) | KEEPALIVE).items()]
        self._server = grpc.aio.server(options=options, interceptors=[Bounded(), *permissions])

    async def start(self) -> None:
        """Listen, and tell the followers where through the group's store."""
        handler = grpc.method_handlers_generic_handler(
            RPC.service, {RPC.name: HANDLERS[RPC.streams](self._follow)}
        )
        self._server.add_generic_rpc_handlers((handler,))
        here = self.rendezvous
        port = tls.add_port(self._server, here.address(0) if here.is_on_one_machine else "[::]:0")
        await self._server.start()
        await asyncio.to_thread(lambda: here.store.set(LEADER_KEY, f"{port} {self._secret}"))

    async def gather(self) -> None:
        """Wait until every rank follows."""
        while not self._all_follow.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REMIND_S):
                    await self._all_follow.wait()
                    break
            log.info("waiting for %s", self._name(set(range(1, self.size)) - self._outboxes.keys()))

    def waiting(self) -> str:
        """Return for which ranks the group waits, and in which command; empty if for none."""
        if not self._all_follow.is_set():
            return f"waits for {self._name(set(range(1, self.size)) - self._outboxes.keys())} to start"
        waits = (
            f"waits for {self._name(silent)} in {pending}"
            for pending in self._pending.values()
            if (silent := set(range(self.size)) - pending.outcomes.keys())
        )
        return "; ".join(waits)

    def executor(self, role: str) -> RankExecutor:
        """Return what runs a role's methods on all ranks."""
        return _RoleExecutor(role, self, self._loop)

    async def watch(self) -> None:
        """Wait until the group cannot continue, then raise; never return.

        Raises:
            RoleUnavailable: the message names the rank and says why.
        """
        await asyncio.shield(self._lost)

    async def close(self) -> None:
        """Tell the followers that rank 0 drains, unless the group is lost, and end their streams."""
        self._is_closing = True
        self._end_streams()
        await self._server.stop(CLOSE_S)

    # ----------------------------------------------------------------------------- pending orders

    def send(self, pending: _PendingOrder, encoded: Sequence[Encoded]) -> None:
        """Send an order to the followers."""
        if self._lost.done() or self._is_closing:
            lost = self._lost.exception() if self._lost.done() else None
            pending.answers.set_exception(lost or RoleUnavailable(f"{pending}: rank 0 drains"))
            return
        self._pending[pending.order.role] = pending
        for rank, part in enumerate(encoded, start=1):
            self._outboxes[rank].put_nowait(part)

    def note(self, pending: _PendingOrder, rank: int, outcome: DataProto | Failure) -> None:
        """Note a rank's outcome. The last one, or the time after the first error, decides."""
        if pending.answers.done():
            return
        is_first_error = isinstance(outcome, Failure) and not any(
            isinstance(other, Failure) for other in pending.outcomes.values()
        )
        pending.outcomes[rank] = outcome
        if len(pending.outcomes) == self.size:
            self._decide(pending)
            return
        if is_first_error:
            pending.timers.append(self._loop.call_later(OTHERS_S, self._decide, pending))
        if rank == 0:
            self._remind_later(pending)

    def _decide(self, pending: _PendingOrder) -> None:
        answers = [pending.outcomes.get(rank) for rank in range(self.size)]
        errors = {answer.error if isinstance(answer, Failure) else "" for answer in answers}
        if all(isinstance(answer, DataProto) for answer in answers):
            pending.answers.set_result(answers)  # type: ignore[arg-type]  # none is an error, none is missing
        elif len(errors) == 1 and "" not in errors:  # every rank raised the same error
            pending.answers.set_exception(pending.own_error)
        else:
            self._lose(self._disagreement(pending))
            return
        self._forget(pending)

    def _disagreement(self, pending: _PendingOrder) -> str:
        failed = {rank: answer for rank, answer in pending.outcomes.items() if isinstance(answer, Failure)}
        rank, failure = next(iter(failed.items()))
        silent = set(range(self.size)) - pending.outcomes.keys()
        others = [f"{self._name([other])}: {failed[other]}" for other in failed if other != rank]
        others += [f"{self._name(silent)} did not answer within {OTHERS_S:.0f} s of it"] if silent else []
        others += [f"{self._name(well)} did not fail"] if (well := pending.outcomes.keys() - failed) else []
        return f"{self._name([rank])} failed in {pending}: {failure}; {'; '.join(others)}"

    def _lose(self, why: str) -> None:
        """Give up the group: fail pending orders, and pass the reason to `watch` and the followers."""
        if self._lost.done() or self._is_closing:
            return
        log.error("the group cannot continue: %s", why)
        error = RoleUnavailable(why)
        self._lost.set_exception(error)
        self._lost.exception()  # retrieved, if nobody watches
        for pending in [*self._pending.values()]:
            pending.answers.set_exception(error)
            self._forget(pending)
        self._end_streams()

    def _end_streams(self) -> None:
        for outbox in self._outboxes.values():
            outbox.put_nowait(None)

    def _forget(self, pending: _PendingOrder) -> None:
        del self._pending[pending.order.role]
        for timer in pending.timers:
            timer.cancel()

    def _remind_later(self, pending: _PendingOrder) -> None:
        def remind() -> None:
            log.info(
                "waiting for %s in %s", self._name(set(range(self.size)) - pending.outcomes.keys()), pending
            )
            self._remind_later(pending)

        pending.timers.append(self._loop.call_later(REMIND_S, remind))

    def _name(self, ranks: Collection[int]) -> str:
        listed = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
        return f"{listed} of {self.size} of {','.join(self._roles)}"

    # ----------------------------------------------------------------------- one follower's stream

    async def _follow(self, requests: Any, context: Context) -> None:
        try:
            rank = self._admitted(context)
        except NotPermitted as error:
            log.warning("refused: %s", error)
            await context.abort(*to_status(error))
        outbox = self._outboxes[rank] = asyncio.Queue()
        if len(self._outboxes) == self.size - 1:
            self._all_follow.set()
        reading = asyncio.create_task(self._read(rank, requests))
        try:
            while (batch := await outbox.get()) is not None:
                for message in CARRIER.send(batch):
                    await context.write(message)
                del batch, message
            if not self._lost.done():
                # The follower ends its requests first. If the call ended while it sends one, even one that has
                # arrived here, gRPC would report INTERNAL to it.
                for message in CARRIER.send(last()):
                    await context.write(message)
                await reading
        finally:
            reading.cancel()
            self._lose(f"{self._name([rank])} is gone: its stream of orders ended")
        if self._lost.done():
            await context.abort(*to_status(self._lost.exception() or AssertionError()))

    def _admitted(self, context: Context) -> int:
        """Return the rank that a caller proves to be.

        Raises:
            NotPermitted: it proves none.
        """
        metadata = dict(context.invocation_metadata() or ())
        if not hmac.compare_digest(str(metadata.get(SECRET_KEY, "")).encode(), self._secret.encode()):
            raise NotPermitted(f"{context.peer()} does not know the secret of this group of ranks")
        if keys := tls.current_keys():
            names = tls.names_of_caller(context)
            if lacking := set(self._roles) - tls.roles_in(names, keys.job):
                raise NotPermitted(f"a follower of {self._roles}: its certificate lacks {sorted(lacking)}")
        named = str(metadata.get(RANK_KEY, ""))
        rank = int(named) if named.isdecimal() and len(named) < 10 else 0
        if not 0 < rank < self.size or rank in self._outboxes or self._lost.done() or self._is_closing:
            raise NotPermitted(f"{context.peer()} cannot follow as rank {named!r} of {self.size}")
        return rank

    async def _read(self, rank: int, requests: Any) -> None:
        try:
            async for batch in receive_batches(requests):
                self._take(rank, RankAnswer.of(batch))
                del batch
        except Exception as error:
            self._lose(f"{self._name([rank])} broke its stream of orders: {type(error).__name__}: {error}")
        self._lose(f"{self._name([rank])} is gone: its stream of orders ended")

    def _take(self, rank: int, answer: RankAnswer) -> None:
        pending = self._pending.get(answer.role)
        if pending is None or pending.order.number != answer.number or rank in pending.outcomes:
            asked = f"{pending} is open" if pending else "no order is open"
            self._lose(f"{self._name([rank])} answered order {answer.number} of {answer.role}, but {asked}")
            return
        self.note(pending, rank, answer.outcome)


class _RoleExecutor:
    """Runs the methods of one role on all ranks, by numbered orders. Used on the role's computing thread."""

    def __init__(self, role: str, leader: Leader, loop: asyncio.AbstractEventLoop) -> None:
        self.size = leader.size
        self._role = role
        self._leader = leader
        self._loop = loop
        self._number = 0  # of the last order

    def run(self, name: str, command: Command, parts: Sequence[DataProto]) -> list[DataProto]:
        """RankExecutor.run. A part that cannot be sent is an error before any rank has an order."""
        assert len(parts) == self.size, f"{len(parts)} parts for {self.size} ranks"
        own, *others = (
            Order(self._number + 1, self._role, name, origin.step.get(), origin.job.get(), part)
            for part in parts
        )
        encoded = [order.encoded() for order in others]
        self._number += 1
        pending = _PendingOrder(own)
        self._loop.call_soon_threadsafe(self._leader.send, pending, encoded)
        outcome: DataProto | Failure
        try:
            outcome = command(own.part)
        except Exception as error:
            pending.own_error = error
            outcome = Failure.of(error)
            if not isinstance(error, RolemeshError):
                log.exception("%s failed", pending)
        self._loop.call_soon_threadsafe(self._leader.note, pending, 0, outcome)
        return pending.answers.result()
