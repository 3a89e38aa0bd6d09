"""One call of a role's method, spread over its replicas as the .proto says.

SHARD_ROWS: the batch is cut by rows into pieces as replicas have room for them, each piece goes to the one with
the least outstanding rows, the answers are joined in row order. BROADCAST: the same request to every replica.

A pure call (idempotency_level) that fails because its replica went away is asked again of another; what is
not pure is asked once. A replica that had no memory for a batch has not begun with it: it is asked again, pure
or not. Nothing is skipped and nothing made up: a call ends with every row or with an error.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from torch import Tensor

from rolemesh.dataproto import DataProto
from rolemesh.door import Door
from rolemesh.errors import RoleBusy, RoleFailed, RoleTimeout, RoleUnavailable
from rolemesh.rpc.batches import check_answer
from rolemesh.rpc.calling.call import Caller
from rolemesh.rpc.calling.pool import ReplicaPool
from rolemesh.rpc.calling.replica import Replica
from rolemesh.rpc.contract import Rpc, rpcs
from rolemesh.tasks import cancel_all, gather
from rolemesh.telemetry import context as origin
from rolemesh.telemetry import metrics, timeline
from rolemesh.v1.data_pb2 import DISPATCH_BROADCAST, DISPATCH_SHARD_ROWS
from rolemesh.wire.streams import receive, receive_batches

# Pieces per replica: with four, a replica that is twice as quick as another gets twice as many, and the
# slowest one keeps the others waiting for a quarter of its share at most.
PIECES_PER_REPLICA = 4
# Below this a piece costs more in overhead than it gains in balance (but every replica gets work).
MIN_PIECE_ROWS = 8
ATTEMPTS_PER_REPLICA = 3
# Before a replica that had no memory for a batch is asked again: twice as long each time, up to the most.
BUSY_S, MAX_BUSY_S = 0.05, 2.0


@dataclass
class _Lease:
    """A replica, and the rows of it that are not answered yet."""

    replica: Replica
    rows: int


@dataclass
class _Tries:
    """How often the same rows were asked for in vain, and how long to wait before the next time."""

    begun: Callable[[], None]
    is_begun: bool = False
    num_failures: int = 0  # other than for want of memory
    wait_s: float = 0.0

    def begin(self) -> None:
        """Tells, once, that a replica has been found."""
        if not self.is_begun:
            self.is_begun = True
            self.begun()

    async def wait(self) -> None:
        """Before the next one; not before the first."""
        if self.wait_s:
            await asyncio.sleep(self.wait_s)


class Dispatcher:
    """The methods of one service over a pool of replicas.

    Args:
        pool: the replicas.
        service: whose methods.
        timeout_s: seconds; deadline of every call, waiting for a replica included.
        rows_at_once: that an engine decodes at once, of answers that are streams; 0: unknown.
        trained: the role has a state that is lost when its process is restarted: an answer of another life
            than the first one's is an error.
        door: what batches are held against that come as answers; None: the service answers with none.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        service: ServiceDescriptor,
        timeout_s: float,
        *,
        rows_at_once: int = 0,
        trained: bool = False,
        door: Door | None = None,
    ) -> None:
        self.pool = pool
        self._rows_at_once = rows_at_once
        self._caller = Caller(pool.role, timeout_s, trained=trained)
        self._door = door or Door({})
        self._rpcs = {rpc.name: rpc for rpc in rpcs(service)}
        self._timeout_s = timeout_s
        for rpc in self._rpcs.values():
            if rpc.pure or rpc.takes_batch:  # 0 at first, so that one is an increase
                metrics.CLIENT_RETRIES.labels(pool.role, rpc.name)

    @property
    def metadata(self) -> dict[str, str]:
        """Sent with every call, besides job, step and id."""
        return self._caller.metadata

    # ------------------------------------------------------------------ whole answers

    async def call(self, name: str, request: DataProto | Message) -> Any:
        """The answer to a request: a DataProto or a message; nothing where it went to every replica.

        Raises:
            RoleTimeout: the deadline passed.
            RoleUnavailable: no replica was left to ask.
            RolemeshError: what the role raised.
        """
        rpc, deadline = self._rpcs[name], self._deadline()
        if isinstance(request, DataProto):
            return await self._shard_rows(rpc, request, deadline)
        assert rpc.dispatch == DISPATCH_BROADCAST, f"{name}: the .proto says no dispatch that is made here"
        return await self._broadcast(rpc, request, deadline)

    async def _shard_rows(self, rpc: Rpc, batch: DataProto, deadline: float) -> Any:
        """Pieces are pulled: each is cut when the one before it has found a replica with room. So a replica
        that joins in the midst takes from what is left, and the cut is as fine as they are many by then."""
        assert rpc.dispatch == DISPATCH_SHARD_ROWS, f"{rpc.name}: the .proto says no dispatch that is made here"
        answers: dict[int, Any] = {}

        async def ask(first: int) -> None:
            piece = batch[first : first + self._piece_rows(len(batch))]
            after = first + len(piece)

            def begun() -> None:
                if after < len(batch):
                    pieces.create_task(ask(after))
                else:
                    self.pool.leave_line(turn)

            answers[first] = await self._piece(rpc, piece, turn, deadline, begun)
            answered(len(piece))

        try:
            async with self.pool.pending(len(batch)) as (turn, answered), asyncio.TaskGroup() as pieces:
                pieces.create_task(ask(0))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        in_order = [answers[first] for first in sorted(answers)]
        return in_order[0] if len(in_order) == 1 else DataProto.concat(in_order)

    def _piece_rows(self, num_rows: int) -> int:
        return piece_rows(num_rows, len(self.pool.live) or 1) if self.pool.has_choice else num_rows

    async def _piece(
        self, rpc: Rpc, batch: DataProto, turn: int, deadline: float, begun: Callable[[], None]
    ) -> Any:
        tries = _Tries(begun)
        while True:
            await tries.wait()
            async with self._lease(rpc, len(batch), turn, deadline) as lease:
                tries.begin()
                try:
                    async with self._caller.call(rpc, lease.replica, batch, deadline) as call:
                        if not rpc.streams[1]:
                            return await self._caller.message(rpc, lease.replica, call)
                        with self._caller.blamed(rpc, lease.replica):
                            answer = await receive(call)
                            await check_answer(rpc, answer, self._door, batch)
                        return answer
                except RoleTimeout:
                    raise
                except RoleUnavailable as error:
                    self._try_again(rpc, lease.replica, error, tries, deadline)

    def _try_again(
        self, rpc: Rpc, replica: Replica, error: RoleUnavailable, tries: _Tries, deadline: float
    ) -> None:
        """Says in `tries` how long to wait before the rows are asked for again, or raises the error. A replica
        that is busy is well and stays in the pool, and its method has not seen the request."""
        if isinstance(error, RoleBusy):
            tries.wait_s = min(2 * tries.wait_s or BUSY_S, MAX_BUSY_S) * random.uniform(0.75, 1.0)
            if time.monotonic() + tries.wait_s >= deadline:
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
        """Batch in, batches of finished rows out, with `row` counted in `batch`. Every row comes once.

        Rows are handed out in parts, pulled like the pieces of a whole answer. A part is what an engine decodes
        at once (`rows_at_once`), and a replica is given another while it has less than two such parts to do:
        each engine is as full as if it had been given everything, and a replica that joins in the midst takes
        from the rows that wait here. Where the engines hold the whole batch it is all begun at once; then one
        that joins helps from the next call on, as rows that are begun stay where they are.
        """
        rpc, deadline = self._rpcs[name], self._deadline()
        # Without a bound: a consumer that takes its time holds up neither replica nor deadline.
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

        try:
            async with self.pool.pending(len(batch)) as (turn, answered):
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
        finally:
            await cancel_all(tasks)

    def _part_rows(self, num_rows: int) -> int:
        """At most an equal share: engines decode many rows at nearly the price of one."""
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
        deadline: float,
        begun: Callable[[], None],
    ) -> None:
        tries = _Tries(begun)
        while len(rows):
            missing = torch.ones(len(rows), dtype=torch.bool)
            await tries.wait()
            async with self._lease(rpc, len(rows), turn, deadline) as lease:
                tries.begin()
                try:
                    asked = batch.select_idxs(rows)
                    async with self._caller.call(rpc, lease.replica, asked, deadline) as call:
                        with self._caller.blamed(rpc, lease.replica):
                            async for part in receive_batches(call):
                                await check_answer(rpc, part, self._door, asked)
                                self._tick_off(missing, part["row"])
                                part["row"] = rows[part["row"]]
                                arrived.put_nowait(part)
                                lease.rows -= len(part)
                                await self.pool.progress(lease.replica, len(part))
                            if missing.any():
                                raise RoleFailed(f"the stream ended without rows {rows[missing].tolist()}")
                except RoleTimeout:
                    raise
                except RoleUnavailable as error:
                    self._try_again(rpc, lease.replica, error, tries, deadline)
            rows = rows[missing]

    @staticmethod
    def _tick_off(missing: Tensor, rows: Tensor) -> None:
        wrong = [r for r in rows.tolist() if not 0 <= r < len(missing) or not missing[r]]
        if wrong or len(set(rows.tolist())) < len(rows):
            raise RoleFailed(f"rows {rows.tolist()} came; {wrong} are not asked for, or came before")
        missing[rows] = False

    # -------------------------------------------------------------------- messages

    async def _broadcast(self, rpc: Rpc, request: Message, deadline: float) -> Any:
        """The same message to every replica; the answer of the first. A replica that is gone is left out as
        long as another one is there; any other failure of any replica is raised.

        Raises:
            RoleUnavailable: every replica is gone.
            RolemeshError: what a replica raised; the message names it.
        """
        answers: list[Any] = []
        for _ in range(ATTEMPTS_PER_REPLICA if rpc.pure else 1):
            await self.pool.wait_for_live()
            answers = await gather(*[self._told(rpc, replica, request, deadline) for replica in self.pool.live])
            for answer in answers:
                if not isinstance(answer, RoleUnavailable):
                    return answer
        raise answers[0]

    async def _told(self, rpc: Rpc, replica: Replica, request: Message, deadline: float) -> Any:
        """The answer, or the error of a replica that is gone."""
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
        """One message to one replica."""
        rpc = self._rpcs[name]
        try:
            with self.pool.holding(replica):
                async with self._caller.call(rpc, replica, request, time.monotonic() + timeout_s) as call:
                    return await self._caller.message(rpc, replica, call)
        except RoleTimeout as error:
            raise RoleTimeout(
                f"{self._caller.where(rpc, replica)}: no answer within {timeout_s:g} s"
            ) from error

    @asynccontextmanager
    async def _lease(self, rpc: Rpc, rows: int, turn: int, deadline: float) -> AsyncIterator[_Lease]:
        try:
            with timeline.recorded(f"{self.pool.role}: waits for a replica", self._caller.method(rpc)):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    lease = _Lease(await self.pool.acquire(rows, turn), rows)
        except TimeoutError as error:
            where = f"{self.pool.role}.{rpc.name} at {self.pool.addresses}, step {origin.step.get()}"
            busy = f"{where}: no replica had room within the deadline of {self._timeout_s:g} s"
            raise RoleTimeout(busy) from error
        try:
            yield lease
        finally:
            await self.pool.release(lease.replica, lease.rows)

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s


def piece_rows(num_rows: int, num_replicas: int) -> int:
    """How many rows the next piece of a batch has: enough pieces for balance, not so many as to be tiny."""
    num_pieces = max(num_replicas, num_rows // MIN_PIECE_ROWS)
    num_pieces = min(num_pieces, PIECES_PER_REPLICA * num_replicas)
    return max(1, -(-num_rows // num_pieces))
