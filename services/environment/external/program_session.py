"""The calls of one episode: answers them one by one, and decides which of them continue the conversation."""

from __future__ import annotations

import asyncio
import hashlib

from rolemesh.agents.environment import Chat, Prompt
from rolemesh.services.environment.external.calls import ChatRequest, RequestRefused, Utterance

OVER = (
    "the conversation has no more turns: it has reached data.max_response_length, or a limit of "
    "rollout.multi_turn (max_assistant_turns, max_user_turns, episode_timeout_s)"
)


class ProgramSession:
    """The messages between a program and the policy.

    A call continues the conversation if it has the same tools, repeats all messages so far, and adds messages
    of which none is the policy's. Any other call is a new prompt for the policy.

    The program uses `call`; the episode uses `next`, `answer` and `end`.
    """

    def __init__(self) -> None:
        self.refused = ""  # reason of the last refusal
        self.is_at_limit = False  # the conversation was over at the last refusal
        self._said: Chat = []
        self._num_turns = 0
        self._last: ChatRequest | None = None
        self._answers: dict[bytes, Utterance] = {}  # the last answer to each call
        self._one = asyncio.Lock()
        self._asked: asyncio.Queue[ChatRequest] = asyncio.Queue(1)
        self._waiting: tuple[ChatRequest, asyncio.Future[Utterance]] | None = None
        self._is_over = False

    # ------------------------------------------------------------------------------ the program's side

    async def call(self, call: ChatRequest, is_retry: bool) -> Utterance:
        """Return the policy's answer. Concurrent calls are answered one after another.

        Args:
            call: the call.
            is_retry: the client may have sent the call before and missed its answer. If the call was answered,
                return the same answer.

        Raises:
            RequestRefused: the conversation is over.
        """
        async with self._one:
            if is_retry and (answered := self._answers.get(_digest(call))) is not None:
                return answered
            try:
                if self._is_over:
                    raise RequestRefused(400, OVER, "messages", "context_length_exceeded")
                self._waiting = (call, asyncio.get_running_loop().create_future())
                self._asked.put_nowait(call)
                return await self._waiting[1]
            except RequestRefused as refused:
                self.refused = str(refused)
                self.is_at_limit = self._is_over
                raise
            finally:
                self._waiting = None

    # ------------------------------------------------------------------------------ the episode's side

    async def next(self) -> tuple[ChatRequest, Chat | Prompt]:
        """Wait for a call. Return it with its new messages if it continues, else with its prompt."""
        call = await self._asked.get()
        number = len(self._said)
        new = call.messages[len(self._said) :]
        goes_on = self._last is not None and call.tools == self._last.tools
        goes_on = goes_on and call.messages[:number] == self._said and new != []
        if goes_on and all(message["role"] != "assistant" for message in new):
            return call, new
        return call, Prompt(call.messages, call.tools, call.max_tokens)

    @property
    def finds_calls(self) -> bool:
        """True if tool calls are to be parsed for the waiting call."""
        return self._waiting is not None and self._waiting[0].finds_calls

    def answer(self, utterance: Utterance) -> None:
        """Answer the waiting call, if the program still waits for it."""
        if self._waiting is not None and not self._waiting[1].done():
            call, waits = self._waiting
            self._said = [*call.messages, utterance.message]
            self._last = call
            self._answers[_digest(call)] = utterance
            waits.set_result(utterance)

    def end(self) -> None:
        """Refuse the waiting call and all later ones."""
        self._is_over = True
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_exception(RequestRefused(400, OVER, "messages", "context_length_exceeded"))


def _digest(call: ChatRequest) -> bytes:
    """Identify a call by a hash. Keeping the messages of all calls would take quadratic memory."""
    return hashlib.sha256(repr(call).encode()).digest()
