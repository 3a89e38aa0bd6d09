"""Lets one controller at a time call a trained role. A refusal names the controller that has the role.

Only the controller that loaded a trained role's state knows what has happened to it since. So LoadCheckpoint
begins a term: its result does not depend on the state before it. docs/wire.md says which calls are served when.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from rolemesh.errors import RoleTaken
from rolemesh.rpc.contract import Rpc
from rolemesh.rpc.serving.handlers import Context
from rolemesh.rpc.term import Term

Behaviour = Callable[[Any, Context], Any]


class ControllerTerms:
    """Records which controller has a trained role, and refuses calls of others.

    Args:
        role: for messages.
        run_dir: of the role's own job. Terms of another run directory are refused.
    """

    def __init__(self, role: str, run_dir: Path) -> None:
        self._role = role
        self._run_dir = run_dir
        self._current: Term | None = None
        self._running: dict[asyncio.Future[None], Term | None] = {}  # done when the call has ended

    def wrap(self, rpc: Rpc, behaviour: Behaviour) -> Behaviour:
        """Return a servicer's method with a check of the call's term, after its request has been read.

        A call does not count as running while a part of its answer is written. So a caller that does not read
        does not delay its successor.

        Args:
            rpc: the method's description.
            behaviour: the servicer's method.
        """

        async def unary(request: Any, context: Context) -> Any:
            async with self._call(rpc, Term.of_call(context.invocation_metadata())):
                return await behaviour(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            term = Term.of_call(context.invocation_metadata())
            async with aclosing(behaviour(request, context)) as answers:
                while True:
                    async with self._call(rpc, term):
                        try:
                            answer = await anext(answers)
                        except StopAsyncIteration:
                            return
                    yield answer

        return stream if rpc.streams[1] else unary

    @asynccontextmanager
    async def _call(self, rpc: Rpc, term: Term | None) -> AsyncIterator[None]:
        """Check a call's term, and count the call as running within the context.

        LoadCheckpoint of a new term ends the old one, and waits for the old one's running calls.

        Raises:
            RoleTaken: another controller has the role, or the term is of another run directory.
        """
        if term:
            self._check_run(rpc, term)
        if rpc.name == "LoadCheckpoint" and term and (not self._current or term.number > self._current.number):
            self._current = term
            if others := [ended for ended, of in self._running.items() if of != term]:
                await asyncio.wait(others)
        if self._current and term != self._current:
            by = term or "a caller without a term"
            raise RoleTaken(f"{self._role}.{rpc.name}: {self._current} has the role; the call is from {by}")
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running[ended] = term
        try:
            yield
        finally:
            del self._running[ended]
            ended.set_result(None)

    def _check_run(self, rpc: Rpc, term: Term) -> None:
        if _is_same(term.run_dir, self._run_dir):
            return
        has = f"{self._current} has it" if self._current else "no controller has it now"
        raise RoleTaken(
            f"{self._role}.{rpc.name}: the role is of the run directory {str(self._run_dir)!r}, and {has}; "
            f"the call is from {term}. Give role and controller the same trainer.default_local_dir, or start "
            "other roles"
        )


def _is_same(run_dir: str, own: Path) -> bool:
    """Compare a caller's run directory with the role's own. Either may have links."""
    try:
        return Path(run_dir) == own or os.path.realpath(run_dir) == os.path.realpath(own)
    except ValueError:  # no path: a NUL, or half a character
        return False
