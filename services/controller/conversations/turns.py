"""Asks the rollout for turns of many rows together."""

from __future__ import annotations

import asyncio

from rolemesh.errors import RoleFailed
from rolemesh.roles import Rollout
from rolemesh.services.controller.conversations.rows import Rows
from rolemesh.tasks import closed_at_end

# Rows that become ready within this time are asked for in one call: a call costs the controller some
# milliseconds. The first is for a rollout that does nothing, the second for one that has other rows to decode.
GATHER_S, GATHER_BUSY_S = 0.005, 0.05
# Calls at the same time: enough that few rows wait for one that ends, and fewer than a server admits.
MAX_CALLS = 32


class Turns:
    """Turns of the rows of one request, asked for one by one and generated together.

    Args:
        rollout: generates.
        rows: grow by each turn.
    """

    def __init__(self, rollout: Rollout, rows: Rows) -> None:
        self._rollout, self._rows = rollout, rows
        self._waiting: dict[int, asyncio.Future[list[int]]] = {}
        self._asked = asyncio.Event()
        self._num_calls = 0  # that run

    async def next_of(self, row: int) -> list[int]:
        """Return the ids of a row's next turn, which the row has from then on."""
        turn: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting[row] = turn
        self._asked.set()
        return await turn

    async def run(self) -> None:
        """Ask for what is waited for. Never returns; raises the first error of the rollout."""
        free = asyncio.Semaphore(MAX_CALLS)
        async with asyncio.TaskGroup() as calls:
            while True:
                await self._asked.wait()
                await asyncio.sleep(GATHER_BUSY_S if self._num_calls else GATHER_S)
                await free.acquire()
                self._asked.clear()
                asked, self._waiting = self._waiting, {}
                call = calls.create_task(self._generate(dict(sorted(asked.items()))))
                call.add_done_callback(lambda _: free.release())

    async def _generate(self, asked: dict[int, asyncio.Future[list[int]]]) -> None:
        self._num_calls += 1
        try:
            await self._receive(asked)
        finally:
            self._num_calls -= 1

    async def _receive(self, asked: dict[int, asyncio.Future[list[int]]]) -> None:
        rows = list(asked)
        stream = self._rollout.generate(self._rows.request(rows))
        async with closed_at_end(stream):
            async for part in stream:
                for at, position in enumerate(part["row"].tolist()):
                    turn = asked[rows[position]]
                    ids = self._rows.take(rows[position], part, at)
                    if not ids:
                        raise RoleFailed(f"the rollout returned row {rows[position]} without a token")
                    if not turn.cancelled():  # its conversation has failed
                        turn.set_result(ids)
