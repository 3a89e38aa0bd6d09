"""Spreads one call of a role's method over its replicas, as the .proto declares.

SHARD_ROWS: the batch is split by rows into pieces as replicas have room. Each piece goes to the replica with
the fewest outstanding rows, and the answers are joined in row order. A method that is not pure gets all rows in
one call. BROADCAST: every replica gets the same request.

A pure call (idempotency_level) is retried at another replica if its replica goes away; other calls are not. A
replica that has no memory for a batch has not begun with it, so that call is retried, pure or not. A call
returns every row or raises an error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from torch import Tensor

from rolemesh.batch_validation import BatchValidator
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleBusy, RoleFailed, RoleTimeout, RoleUnavailable
from rolemesh.rpc.batches import answer_conditions, check_answer
from rolemesh.rpc.calling.affinity import ReplicaAffinity
from rolemesh.rpc.calling.call import Caller
from rolemesh.rpc.calling.deadlines import Deadline, Deadlines
from rolemesh.rpc.calling.pool import ReplicaPool
from rolemesh.rpc.calling.replica import Replica
from rolemesh.rpc.contract import Rpc, rpcs
from rolemesh.tasks import cancel_all, gather
from rolemesh.telemetry import context as origin
from rolemesh.telemetry import metrics, timeline
from rolemesh.v1.data_pb2 import DISPATCH_BROADCAST, DISPATCH_SHARD_ROWS
from rolemesh.wire.streams import receive, receive_batches

# Pieces per replica. With four, a replica that is twice as fast gets twice as many, and the others wait for the
# slowest at most a quarter of its share.
PIECES_PER_REPLICA = 4
# Smaller pieces cost more in overhead than they gain in balance (but every replica gets work).
MIN_PIECE_ROWS = 8
ATTEMPTS_PER_REPLICA = 3
# Backoff before retrying a replica that had no memory for a batch: doubled each time, up to the maximum.
BUSY_S = 0.05
MAX_BUSY_S = 2.0


@dataclass
class _Reservation:
    """Rows reserved at a replica that are not answered yet."""

    replica: Replica
    rows: int


@dataclass
class _Tries:
    """The failed attempts for the same rows, and the wait before the next attempt."""

    begun: Callable[[], None]
    is_begun: bool = False
    num_failures: int = 0  # other than for lack of memory
    wait_s: float = 0.0

    def begin(self) -> None:
        """Call `begun`, once, when a replica has been found."""
        if not self.is_begun:
            self.is_begun = True
            self.begun()

    async def wait(self) -> None:
        """Wait before the next attempt; the first has no wait."""
        if self.wait_s:
            await asyncio.sleep(self.wait_s)


class Dispatcher:
    """Calls the methods of one service on a pool of replicas.

    Args:
        pool: the replicas.
        service: the service's descriptor.
        timeout_s: seconds; deadline of every call, including the wait for a replica, but not the time behind
            earlier calls (deadlines.py).
        rows_at_once: rows that an engine decodes at once, for streamed answers; 0: unknown.
        trained: the role has state that a restart of its process loses, so an answer after a restart is an
            error.
        validator: checks batches in answers; None: the service's answers have none.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        service: ServiceDescriptor,
        timeout_s: float,
        *,
        rows_at_once: int = 0,
        trained: bool = False,
        validator: BatchValidator | None = None,
    ) -> None:
        self.pool = pool
        self._rows_at_once = rows_at_once
        self._affinity = ReplicaAffinity()
        self._caller = Caller(pool.role, trained=trained)
        self._validator = validator or BatchValidator({})
        self._rpcs = {rpc.name: rpc for rpc in rpcs(service)}
        self._deadlines = Deadlines(timeout_s)
        for rpc in self._rpcs.values():
            if rpc.pure or rpc.takes_batch:  # starts at 0, so that the first retry is an increase
                metrics.CLIENT_RETRIES.labels(pool.role, rpc.name)

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata sent with every call, in addition to job, step and id."""
        return self._caller.metadata

    # ------------------------------------------------------------------ whole answers

    async def call(self, name: str, request: DataProto | Message) -> Any:
        """Call a method and return its answer, a DataProto or a message; of a broadcast, one replica's answer.

        Raises:
            RoleTimeout: the deadline passed.
            RoleUnavailable: no replica was left.
            RolemeshError: raised by the role.
        """
        rpc = self._rpcs[name]
        with self._deadlines.opened() as deadline:
            if isinstance(request, DataProto):
                return await self._shard_rows(rpc, request, deadline)
            return await self._broadcast(rpc, request, deadline)

    async def _shard_rows(self, rpc: Rpc, batch: DataProto, deadline: Deadline) -> Any:
        """Split a batch of a pure method into pieces, and join the answers in row order.

        A piece is cut when the piece before it has found a replica with room. So a replica that joins during
        the call takes from the remaining rows, and the piece size follows the current number of replicas.
        """
        assert rpc.dispatch == DISPATCH_SHARD_ROWS, f"{rpc.name}: the .proto declares no dispatch for a batch"
        answers: dict[int, Any] = {}

        async def ask(first: int) -> None:
            piece = batch[first : first + self._piece_rows(rpc, len(batch))]
            after = first + len(piece)

            def begun() -> None:
                if after < len(batch):
                    pieces.create_task(ask(after))
                else:
                    self.pool.leave_line(turn)

            answers[first] = await self._piece(rpc, piece, turn, deadline, begun)
            self._deadlines.answered(deadline)
            answered(len(piece))

        try:
            async with self.pool.pending(len(batch)) as (turn, answered), asyncio.TaskGroup() as pieces:
                pieces.create_task(ask(0))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        in_order = [answers[first] for first in sorted(answers)]
        return in_order[0] if len(in_order) == 1 else DataProto.concat(in_order)

    def _piece_rows(self, rpc: Rpc, num_rows: int) -> int:
        if rpc.pure and self.pool.has_choice:
            return piece_rows(num_rows, len(self.pool.live) or 1)
        return num_rows  # a piece of an Update would be an update of its own

    async def _piece(
        self, rpc: Rpc, batch: DataProto, turn: int, deadline: Deadline, begun: Callable[[], None]
    ) -> Any:
        tries = _Tries(begun)
        while True:
            await tries.wait()
            async with self._reserved(rpc, len(batch), turn, deadline) as reserved:
                tries.begin()
                try:
                    async with self._caller.call(rpc, reserved.replica, batch, deadline) as call:
                        if not rpc.streams[1]:
                            return await self._caller.message(rpc, reserved.replica, call)
                        with self._caller.blamed(rpc, reserved.replica):
                            answer = await receive(call, answer_conditions(rpc, self._validator, batch))
                            await check_answer(rpc, answer, self._validator, batch)
                        return answer
                except RoleUnavailable as error:
                    self._try_again(rpc, reserved.replica, error, tries, deadline)

    def _try_again(
        self, rpc: Rpc, replica: Replica, error: RoleUnavailable, tries: _Tries, deadline: Deadline
    ) -> None:
        """Set the wait before the retry in `tries`, or raise the error.

        A busy replica is healthy and stays in the pool; its method has not seen the request. A RoleTimeout
        before the deadline is the replica's own: the request was silent.
        """
        if deadline.has_passed:
            raise error
        if isinstance(error, RoleBusy):
            tries.wait_s = min(2 * tries.wait_s or BUSY_S, MAX_BUSY_S) * random.uniform(0.75, 1.0)
            if tries.wait_s >= deadline.left_s:
                raise error
        else:
            tries.wait_s = 0.0
            tries.num_failures += 1
            self.pool.suspect(replica, str(error))
            most = ATTEMPTS_PER_REPLICA * max(1, len(self.pool.replicas))
            if not rpc.pure or tries.num_failures >= most:
                raise error
        metrics.CLIENT_RETRIES.labels(self.pool.role, rpc.name).inc()

    # ---------------------------------------------------------------- streamed answers

    async def stream_rows(self, name: str, batch: DataProto) -> AsyncIterator[DataProto]:
        """Yield batches of finished rows, with column `row` counted in `batch`. Every row comes exactly once.

        Rows are handed out in parts of `rows_at_once`, cut like the pieces of `_shard_rows`. A replica gets
        another part while it has less than two such parts outstanding. This keeps each engine as full as if it
        had all rows, and a replica that joins takes from the remaining rows. Rows of several turns go to the
        replica that answered most of them last, if it has room. If the engines can hold the whole
        batch, all of it is started at once. A replica that joins then helps only from the next call on, because
        started rows do not move.
        """
        rpc = self._rpcs[name]
        # Unbounded, so that a slow consumer delays neither a replica nor the deadline.
        arrived: asyncio.Queue[DataProto | Exception | None] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []

        def begin(first: int) -> None:
            if first < len(batch):
                end = min(first + self._part_rows(len(batch)), len(batch))
                tasks.append(asyncio.create_task(part(first, end)))
            else:
                self.pool.leave_line(turn)

        async def part(first: int, end: int) -> None:
            rows = torch.arange(first, end)
            try:
                await self._rows(rpc, batch, rows, arrived, turn, deadline, partial(begin, end))
            except Exception as error:
                arrived.put_nowait(error)
            else:
                arrived.put_nowait(None)

        async with AsyncExitStack() as stack:
            deadline = stack.enter_context(self._deadlines.opened())
            turn, answered = await stack.enter_async_context(self.pool.pending(len(batch)))
            stack.push_async_callback(cancel_all, tasks)
            begin(0)
            ended = 0
            while ended < len(tasks):
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    ended += 1
                else:
                    answered(len(item))
                    yield item

    def _part_rows(self, num_rows: int) -> int:
        """Return the size of a part, at most an equal share: many rows decode at nearly the cost of one."""
        if not self.pool.has_choice:
            return num_rows
        share = -(-num_rows // (len(self.pool.live) or 1))
        return min(share, self._rows_at_once or share)

    async def _rows(
        self,
        rpc: Rpc,
        batch: DataProto,
        rows: Tensor,
        arrived: asyncio.Queue[Any],
        turn: int,
        deadline: Deadline,
        begun: Callable[[], None],
    ) -> None:
        tries = _Tries(begun)
        while len(rows):
            missing = torch.ones(len(rows), dtype=torch.bool)
            await tries.wait()
            asked = batch.select_idxs(rows)
            hint = "" if tries.wait_s else self._affinity.of(asked)  # not again a replica that was busy
            async with self._reserved(rpc, len(rows), turn, deadline, hint) as reserved:
                tries.begin()
                try:
                    async with self._caller.call(rpc, reserved.replica, asked, deadline) as call:
                        with self._caller.blamed(rpc, reserved.replica):
                            conditions = answer_conditions(rpc, self._validator, asked)
                            async for part in receive_batches(call, conditions):
                                await check_answer(rpc, part, self._validator, asked)
                                self._tick_off(missing, part["row"])
                                self._affinity.note(asked, part["row"].tolist(), reserved.replica)
                                part["row"] = rows[part["row"]]
                                arrived.put_nowait(part)
                                self._deadlines.answered(deadline)
                                reserved.rows -= len(part)
                                await self.pool.progress(reserved.replica, len(part))
                            if missing.any():
                                raise RoleFailed(f"the stream ended without rows {rows[missing].tolist()}")
                except RoleUnavailable as error:
                    self._try_again(rpc, reserved.replica, error, tries, deadline)
            rows = rows[missing]

    @staticmethod
    def _tick_off(missing: Tensor, rows: Tensor) -> None:
        wrong = [r for r in rows.tolist() if not 0 <= r < len(missing) or not missing[r]]
        if wrong or len(set(rows.tolist())) < len(rows):
            raise RoleFailed(f"rows {rows.tolist()} came, but {wrong} were not asked for or came before")
        missing[rows] = False

    # -------------------------------------------------------------------- messages

    async def _broadcast(self, rpc: Rpc, request: Message, deadline: Deadline) -> Any:
        """Send the same message to every replica, and return the answer of the first available one.

        Unavailable replicas are skipped as long as another one answers. Any other failure is raised.

        Raises:
            RoleUnavailable: every replica is unavailable.
            RolemeshError: raised by a replica; the message names it.
        """
        assert rpc.dispatch == DISPATCH_BROADCAST, (
            f"{rpc.name}: the .proto declares no dispatch for its request"
        )
        answers: list[Any] = []
        for _ in range(ATTEMPTS_PER_REPLICA if rpc.pure else 1):
            await self.pool.wait_for_live()
            answers = await gather(
                *[self._answer_or_unavailable(rpc, replica, request, deadline) for replica in self.pool.live]
            )
            for answer in answers:
                if not isinstance(answer, RoleUnavailable):
                    return answer
        raise answers[0]

    async def _answer_or_unavailable(
        self, rpc: Rpc, replica: Replica, request: Message, deadline: Deadline
    ) -> Any:
        """Return the answer, or the error of an unavailable replica."""
        try:
            with self.pool.holding(replica):
                async with self._caller.call(rpc, replica, request, deadline) as call:
                    return await self._caller.message(rpc, replica, call)
        except RoleTimeout:
            raise
        except RoleUnavailable as error:
            self.pool.suspect(replica, str(error))
            return error

    async def tell(self, name: str, replica: Replica, request: Message, timeout_s: float) -> Any:
        """Send one message to one replica, and return its answer. The replica learns the deadline."""
        rpc = self._rpcs[name]
        deadline = Deadline(timeout_s)
        try:
            with self.pool.holding(replica):
                async with self._caller.call(rpc, replica, request, deadline, sends_deadline=True) as call:
                    return await self._caller.message(rpc, replica, call)
        except RoleUnavailable as error:
            # A server that ends a call at its deadline may also say CANCELLED.
            if not isinstance(error, RoleTimeout) and deadline.left_s > 0:
                raise
            where = self._caller.where(rpc, replica)
            raise RoleTimeout(f"{where}: no answer within {timeout_s:g} s") from error

    @asynccontextmanager
    async def _reserved(
        self, rpc: Rpc, rows: int, turn: int, deadline: Deadline, hint: str = ""
    ) -> AsyncIterator[_Reservation]:
        try:
            with timeline.recorded(f"{self.pool.role}: waits for a replica", self._caller.method(rpc)):
                async with deadline.limit():
                    reserved = _Reservation(await self.pool.acquire(rows, turn, hint), rows)
        except TimeoutError as error:
            where = f"{self.pool.role}.{rpc.name} at {self.pool.addresses}, step {origin.step.get()}"
            busy = f"{where}: no replica had room within the deadline of {deadline.timeout_s:g} s"
            raise RoleTimeout(busy) from error
        try:
            yield reserved
        finally:
            await self.pool.release(reserved.replica, reserved.rows)


def piece_rows(num_rows: int, num_replicas: int) -> int:
    """Return the number of rows of a batch's next piece: enough pieces for balance, but no tiny ones."""
    num_pieces = max(num_replicas, num_rows // MIN_PIECE_ROWS)
    num_pieces = min(num_pieces, PIECES_PER_REPLICA * num_replicas)
    return max(1, -(-num_rows // num_pieces))
