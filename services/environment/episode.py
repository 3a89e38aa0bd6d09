"""One episode of a replica: answers its turns in order. A turn that is sent again gets the same answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message

from rolemesh.agents.environment import Conversation
from rolemesh.agents.messages import answer_of, end_of, invalid_as, message_of, opening_of
from rolemesh.errors import EnvironmentFailed, EpisodeLost, InvalidBatch, InvalidData, RolemeshError
from rolemesh.services.environment.timeouts import TookTooLong, look_at, within
from rolemesh.v1.environment_pb2 import (
    ActRequest,
    ActResponse,
    CloseEpisodeResponse,
    OpenEpisodeRequest,
    OpenEpisodeResponse,
)

log = logging.getLogger(__name__)

R = TypeVar("R")

# Fields of a turn that only agents with `calls` get (AgentSpec).
OF_A_PROGRAM = ("text", "cut", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class EpisodeTimeouts:
    """Time limits.

    Args:
        call_s: seconds for one turn.
        episode_s: seconds after which an episode without requests is abandoned.
    """

    call_s: float
    episode_s: float


class OpenedEpisode:
    """One attempt of an episode.

    If a call breaks off, its work continues. When the call is repeated, it gets the same answer.

    Args:
        request: opens the episode.
        opens: makes the conversation.
        limits: time limits.
        answered: called once for each answered turn, with the answer.
        ended: called with the reason after the episode has released its resources.
    """

    def __init__(
        self,
        request: OpenEpisodeRequest,
        opens: Callable[[], Awaitable[Conversation]],
        limits: EpisodeTimeouts,
        answered: Callable[[OpenedEpisode, ActResponse], None],
        ended: Callable[[OpenedEpisode, str], None],
    ) -> None:
        self.name = request.episode
        self.attempt = request.attempt
        self.agent = request.agent
        self.where = f"row {request.uid} (agent {request.agent})"
        self._opens = opens
        self._limits = limits
        self._answered = answered
        self._ended = ended
        self._conversation: Conversation | None = None
        self._opening = _started(self._open())
        self._turn = 0
        self._said = b""
        self._is_done = False
        self._acting: asyncio.Task[ActResponse] | None = None
        self._closing: asyncio.Task[CloseEpisodeResponse] | None = None
        self._failure: RolemeshError | None = None
        self._loop = asyncio.get_running_loop()
        self._asked_at = self._loop.time()
        self._timer = self._loop.call_later(limits.episode_s, self._abandon_if_idle)

    # ------------------------------------------------------------------------------- requests

    async def opened(self) -> OpenEpisodeResponse:
        """Return the environment's first messages, or the prompt that it sets.

        Raises:
            EnvironmentFailed: the conversation could not begin.
            InvalidBatch, InvalidData: the request or its row is unusable.
        """
        return await self._answer(self._opening)

    async def act(self, request: ActRequest) -> ActResponse:
        """Answer the next turn, or repeat the answer to the last one.

        Raises:
            InvalidBatch: the turn is neither the next nor the last one, or is unreadable.
            EnvironmentFailed: the conversation raised, took too long or returned something invalid.
            EpisodeLost: the episode ended meanwhile.
        """
        said = hashlib.blake2b(request.message.SerializeToString(deterministic=True), digest_size=16).digest()
        if self._acting is not None and request.turn == self._turn:
            if said != self._said:
                raise InvalidBatch(f"{self.where}: turn {request.turn} came again with another message")
            return await self._answer(self._acting)
        self._raise_failure()
        if self._closing is not None:
            raise EpisodeLost(f"{self.where}: the episode was closed before turn {request.turn}")
        if request.turn != self._turn + 1:
            expected = f"{self._turn + 1}, or {self._turn} again" if self._turn else "1"
            raise InvalidBatch(f"{self.where}: turn {request.turn} came; {expected} expected")
        if not (self._opening if self._acting is None else self._acting).done():
            raise InvalidBatch(f"{self.where}: turn {request.turn} came before the previous call was answered")
        if self._is_done:
            raise InvalidBatch(f"{self.where}: turn {request.turn} came, but turn {self._turn} was the last")
        turn = message_of(request.message, f"{self.where}: turn {request.turn}")
        if request.completion_tokens:  # only for an agent that sets its prompt
            turn |= {name: getattr(request, name) for name in OF_A_PROGRAM}
        self._turn = request.turn
        self._said = said
        self._acting = _started(self._act(turn))
        return await self._answer(self._acting)

    async def closed(self) -> CloseEpisodeResponse:
        """End the episode, and return its reward.

        Raises:
            EnvironmentFailed: the conversation failed, now or earlier.
        """
        self._raise_failure()
        return await self._answer(self.end("closed"))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def end(self, reason: str) -> asyncio.Task[CloseEpisodeResponse]:
        """Return the task that closes the episode, even during a turn. The first call starts it."""
        if self._closing is None:
            self._timer.cancel()
            self._closing = _started(self._close(reason))
        return self._closing

    async def _answer(self, task: asyncio.Task[R]) -> R:
        self._asked_at = self._loop.time()
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # the awaited work was cancelled, not this call
                raise EpisodeLost(f"{self.where}: the episode was ended meanwhile") from None
            raise
        finally:
            self._asked_at = self._loop.time()

    # ----------------------------------------------------------------------------------- work

    async def _open(self) -> OpenEpisodeResponse:
        with _Failing(self):
            self._conversation = conversation = await self._bounded(self._opens(), "opening")
            said = await self._bounded(conversation.begin(), "begin")
            with invalid_as(EnvironmentFailed, self.where):
                return opening_of(said, "what begin returned")

    async def _act(self, turn: dict[str, Any]) -> ActResponse:
        assert self._conversation is not None
        with _Failing(self):
            said = await self._bounded(self._conversation.act(turn), f"turn {self._turn}")
            with invalid_as(EnvironmentFailed, self.where):
                answer = answer_of(said, f"the answer to turn {self._turn}")
            self._is_done = answer.done
            self._answered(self, answer)
            return answer

    async def _close(self, reason: str) -> CloseEpisodeResponse:
        try:
            for task in (self._opening, self._acting):
                if task is not None and not task.done() and task is not asyncio.current_task():
                    task.cancel()
                    await asyncio.wait({task})
            if self._conversation is None:
                return CloseEpisodeResponse()
            outcome = await self._bounded(self._conversation.close(), "close")
            with invalid_as(EnvironmentFailed, self.where):
                return end_of(outcome, "what close returned")
        finally:
            self._conversation = None
            self._ended(self, reason)

    async def _bounded(self, work: Awaitable[R], doing: str) -> R:
        """Run the environment's code for at most `call_s` seconds, and name the row in its errors."""
        try:
            return await within(self._limits.call_s, work)
        except TookTooLong as error:
            raise EnvironmentFailed(
                f"{self.where}: {doing}: {error} (rollout.multi_turn.call_timeout_s)"
            ) from error
        except (EnvironmentFailed, InvalidBatch, InvalidData) as error:
            raise type(error)(f"{self.where}: {error}") from error
        except Exception as error:
            log.exception("%s: %s", self.where, doing)
            said = f"{type(error).__name__}: {_text_of(error)}"
            raise EnvironmentFailed(f"{self.where}: {doing} raised {said}") from error

    def fail(self, error: RolemeshError) -> None:
        """Answer every later call with this error, and release the episode's resources."""
        self._failure = error
        if self._closing is None:
            self._timer.cancel()
            self._closing = _started(self._close("failed"))

    def _abandon_if_idle(self) -> None:
        idle_s = self._loop.time() - self._asked_at
        works = any(task is not None and not task.done() for task in (self._opening, self._acting))
        if idle_s < self._limits.episode_s or works:
            left_s = max(self._limits.episode_s - idle_s, 0.01) if not works else self._limits.episode_s
            self._timer = self._loop.call_later(left_s, self._abandon_if_idle)
            return
        log.warning("%s: nobody asked about the episode for %.0f s; it is abandoned", self.where, idle_s)
        self.end("abandoned")


class _Failing:
    """Marks the episode as failed if the block raises a RolemeshError."""

    def __init__(self, episode: OpenedEpisode) -> None:
        self._episode = episode

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RolemeshError):
            self._episode.fail(error)


def _started(work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
    """Start a task. Its error may be retrieved later, or never."""
    task = asyncio.create_task(work)
    task.add_done_callback(look_at)
    return task


def _text_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"(no message: {type(another).__name__})"


def name_of(request: Message) -> str:
    """Return the name of a request's episode, for messages."""
    return f"episode {request.episode!r:.200}"  # type: ignore[attr-defined]  # all requests but Describe's
