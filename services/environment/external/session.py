"""The calls of one episode, one after another, and which of them go on with what was said before."""

from __future__ import annotations

import asyncio
import hashlib

from rolemesh.agents.environment import Chat, Prompt
from rolemesh.services.environment.external.calls import Call, Refused, Said

OVER = (
    "the conversation has no more turns: it has reached data.max_response_length, or a limit of "
    "rollout.multi_turn (max_assistant_turns, max_user_turns, episode_timeout_s)"
)


class Session:
    """The messages between a program and the policy.

    A call that has what was said before, and messages after it, goes on with the conversation. Any other shows
    the policy another prompt.

    The program's side uses `call`, the episode's side `next`, `answer` and `end`.
    """

    def __init__(self) -> None:
        self.refused = ""  # why the last refused call was
        self.is_at_limit = False  # the last refused call was refused because the conversation is over
        self._said: Chat = []
        self._num_turns = 0
        self._last: Call | None = None
        self._answers: dict[bytes, Said] = {}  # the last to each call
        self._one = asyncio.Lock()
        self._asked: asyncio.Queue[Call] = asyncio.Queue(1)
        self._waiting: tuple[Call, asyncio.Future[Said]] | None = None
        self._is_over = False

    # ------------------------------------------------------------------------------ the program's side

    async def call(self, call: Call, is_retry: bool) -> Said:
        """Return the policy's answer. Calls at the same time wait for one another.

        Args:
            call: the call.
            is_retry: its client sends it again, and does not know whether it was answered. If it was, it gets
                the same answer.

        Raises:
            Refused: the conversation is over.
        """
        async with self._one:
            if is_retry and (answered := self._answers.get(_digest(call))) is not None:
                return answered
            try:
                if self._is_over:
                    raise Refused(400, OVER, "messages", "context_length_exceeded")
                self._waiting = (call, asyncio.get_running_loop().create_future())
                self._asked.put_nowait(call)
                return await self._waiting[1]
            except Refused as refused:
                self.refused, self.is_at_limit = str(refused), self._is_over
                raise
            finally:
                self._waiting = None

    # ------------------------------------------------------------------------------ the episode's side

    async def next(self) -> tuple[Call, Chat | Prompt]:
        """Wait for a call; return it with those of its messages that are new, or with the prompt that it is."""
        call = await self._asked.get()
        number, new = len(self._said), call.messages[len(self._said) :]
        goes_on = self._last is not None and call.tools == self._last.tools
        goes_on = goes_on and call.messages[:number] == self._said and new != []
        if goes_on and all(message["role"] != "assistant" for message in new):
            return call, new
        return call, Prompt(call.messages, call.tools, call.max_tokens)

    @property
    def finds_calls(self) -> bool:
        """True if the waiting call wants calls of tools to be parsed."""
        return self._waiting is not None and self._waiting[0].finds_calls

    def answer(self, said: Said) -> None:
        """Answer the call that waits, if the program still does."""
        if self._waiting is not None and not self._waiting[1].done():
            call, waits = self._waiting
            self._said = [*call.messages, said.message]
            self._last = call
            self._answers[_digest(call)] = said
            waits.set_result(said)

    def end(self) -> None:
        """Refuse the call that waits, and all further ones."""
        self._is_over = True
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_exception(Refused(400, OVER, "messages", "context_length_exceeded"))


def _digest(call: Call) -> bytes:
    """Return a name of a call: the messages of all calls would take the square of a conversation's memory."""
    return hashlib.sha256(repr(call).encode()).digest()
