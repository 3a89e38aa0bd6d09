"""A follower, a rank above 0, runs what the leader, rank 0, orders, until the stream of orders ends."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

import grpc

from rolemesh.errors import InvalidBatch, RolemeshError, RoleUnavailable
from rolemesh.ranks.executor import Command
from rolemesh.ranks.rank_messages import (
    KEEPALIVE,
    LEADER_KEY,
    REMIND_S,
    RPC,
    Failure,
    Order,
    RankAnswer,
    is_last,
)
from rolemesh.ranks.rendezvous import Rendezvous
from rolemesh.rpc.channels import CLIENT_OPTIONS, open_channel
from rolemesh.rpc.metadata import RANK_KEY, SECRET_KEY
from rolemesh.rpc.status_codes import from_status
from rolemesh.telemetry import context as origin
from rolemesh.wire.codec import Encoded
from rolemesh.wire.streams import CARRIER, receive_batches

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # time in which a connection that a busy rank 0 dropped is retried


async def follow(
    roles: Sequence[str],
    rendezvous: Rendezvous,
    threads: Mapping[str, Executor],
    command_of: Callable[[str, str], Command],
) -> None:
    """Follow rank 0, and return when it drains.

    Args:
        roles: of the process.
        rendezvous: where its ranks meet.
        threads: of each role, on which its commands run.
        command_of: a role's command of this name; called on the role's thread.

    Raises:
        RoleUnavailable: rank 0 is gone, or the group cannot continue; the message says why.
    """
    group = ",".join(roles)
    port, secret = (await _read_leader(rendezvous, group)).split()
    follower = _Follower(threads, command_of)
    metadata = ((RANK_KEY, str(rendezvous.rank)), (SECRET_KEY, secret))
    options = [*(dict(CLIENT_OPTIONS) | KEEPALIVE).items()]
    async with open_channel(rendezvous.address(int(port)), roles[0], options) as channel:
        with suppress(TimeoutError):  # the call below is tried once, and reports the problem
            async with asyncio.timeout(CONNECT_S):
                await channel.channel_ready()
        start: Any = channel.stream_stream  # its stub requires serializers, and frames have none
        call = start(RPC.path)(follower.answers(), metadata=metadata)
        log.info("following rank 0 of %d of %s", rendezvous.size, group)
        try:
            async for batch in receive_batches(call):
                if is_last(batch):
                    follower.end()
                else:
                    follower.take(Order.of(batch))
                del batch
        except grpc.aio.AioRpcError as error:
            raise RoleUnavailable(str(from_status(error, f"rank 0 of {rendezvous.size} of {group}"))) from error
        except InvalidBatch as error:
            raise RoleUnavailable(f"rank 0 sent an invalid order: {error}") from error


async def _read_leader(rendezvous: Rendezvous, group: str) -> str:
    """Return what rank 0 wrote into the group's store."""
    asked = asyncio.create_task(asyncio.to_thread(lambda: rendezvous.store.get(LEADER_KEY)))
    while not (await asyncio.wait({asked}, timeout=REMIND_S))[0]:
        log.info("waiting for rank 0 of %d of %s", rendezvous.size, group)
    try:
        return str((await asked).decode())
    except RuntimeError as error:  # every error of a store is one
        raise RoleUnavailable(f"rank 0 of {rendezvous.size} of {group} did not come: {error}") from error


class _Follower:
    """Runs orders in the sequence of their numbers, each role's on the role's thread."""

    def __init__(self, threads: Mapping[str, Executor], command_of: Callable[[str, str], Command]) -> None:
        self._threads = threads
        self._command_of = command_of
        self._numbers: Counter[str] = Counter()  # of each role's last order
        self._outbox: asyncio.Queue[Encoded | None] = asyncio.Queue()
        self._running: set[asyncio.Task[None]] = set()

    async def answers(self) -> AsyncIterator[bytes]:
        """Yield the messages of the answers, as they come, until the end."""
        while (answer := await self._outbox.get()) is not None:
            for message in CARRIER.send(answer):
                yield message

    def take(self, order: Order) -> None:
        """Take the next order of a role, and run it after its earlier ones."""
        running = asyncio.create_task(self._run(order))  # tasks start in this order
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def end(self) -> None:
        """Send the answers that exist, and no later ones."""
        self._outbox.put_nowait(None)

    async def _run(self, order: Order) -> None:
        origin.job.set(order.job)
        origin.role.set(order.role)
        origin.step.set(order.step)
        expected = self._numbers[order.role] + 1
        if order.role not in self._threads or order.number != expected:
            why = (
                f"refused order {order.number} of {order.role}; expected {expected}, of {sorted(self._threads)}"
            )
            log.error("%s", why)
            self._outbox.put_nowait(RankAnswer(order.number, order.role, Failure("", why)).encoded())
            return
        self._numbers[order.role] = expected
        run = contextvars.copy_context().run
        loop = asyncio.get_running_loop()
        thread = self._threads[order.role]
        self._outbox.put_nowait(await loop.run_in_executor(thread, run, self._answer, order))

    def _answer(self, order: Order) -> Encoded:
        try:
            outcome = self._command_of(order.role, order.method)(order.part)
            return RankAnswer(order.number, order.role, outcome).encoded()
        except Exception as error:
            if not isinstance(error, RolemeshError):  # rank 0 reports it, but has no traceback of it
                log.exception("%s.%s (order %d) failed", order.role, order.method, order.number)
            return RankAnswer(order.number, order.role, Failure.of(error)).encoded()
