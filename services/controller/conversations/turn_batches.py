"""Batches the turns that conversations wait for into calls of the rollout."""

from __future__ import annotations

import asyncio

from rolemesh.errors import RoleFailed
from rolemesh.roles import Rollout
from rolemesh.services.controller.conversations.row_columns import Rows
from rolemesh.tasks import closed_at_end

# Rows that become ready within this time share a call, because a call costs the controller some milliseconds.
# The first value is for an idle rollout, the second for one that decodes other rows meanwhile.
GATHER_S = 0.005
GATHER_BUSY_S = 0.05
# Concurrent calls: enough that few rows wait for a free one, and fewer than a server admits.
MAX_CALLS = 32


class Turns:
    """Generates turns of the rows of one request: each row asks for its own, calls generate many together.

    Args:
        rollout: generates the turns.
        rows: each turn is appended to its row.
    """

    def __init__(self, rollout: Rollout, rows: Rows) -> None:
        self._rollout = rollout
        self._rows = rows
        self._waiting: dict[int, asyncio.Future[list[int]]] = {}
        self._asked = asyncio.Event()
        self._num_calls = 0  # running calls

    async def next_turn(self, row: int) -> list[int]:
        """Generate a row's next turn, append it to the row, and return its ids."""
        turn: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting[row] = turn
        self._asked.set()
        return await turn

    async def run(self) -> None:
        """Generate the turns that are waited for. Never returns; raises the first error of the rollout."""
        free = asyncio.Semaphore(MAX_CALLS)
        async with asyncio.TaskGroup() as calls:
            while True:
                await self._asked.wait()
                await asyncio.sleep(GATHER_BUSY_S if self._num_calls else GATHER_S)
                await free.acquire()
                self._asked.clear()
                asked = self._waiting
                self._waiting = {}
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
                    ids = self._rows.append_turn(rows[position], part, at)
                    if not ids:
                        raise RoleFailed(f"the rollout returned row {rows[position]} without a token")
                    if not turn.cancelled():  # its conversation has failed
                        turn.set_result(ids)
