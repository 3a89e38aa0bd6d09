"""Runs an episode's program as a conversation: the messages in its calls are the environment's answers."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from rolemesh.agents.environment import Chat, Endpoint, Episode, Observation, Outcome, Prompt
from rolemesh.config import JobConfig
from rolemesh.errors import EnvironmentFailed, RolemeshError
from rolemesh.services.environment.external.calls import ChatRequest, utterance_of
from rolemesh.services.environment.external.endpoint import EpisodeEndpoint
from rolemesh.services.environment.external.program_session import ProgramSession
from rolemesh.services.environment.timeouts import Threads, look_at, without_exit

log = logging.getLogger(__name__)

Program = Callable[[Episode, Endpoint, JobConfig], Any]


class Programs:
    """The programs of all rows with one agent_name. Implements rolemesh.agents.environment.Agent.

    Args:
        job: the job.
        program: holds one conversation (AgentSpec.calls). A function that is not async runs on a thread.
        server: serves the policy to the program.
    """

    tools: tuple[Mapping[str, Any], ...] = ()  # each program brings its own

    def __init__(self, job: JobConfig, program: Program, server: EpisodeEndpoint) -> None:
        self.job = job
        self.program = program
        self.server = server
        self._threads = Threads(job.rollout.multi_turn.max_episodes)  # a program keeps its thread until it ends

    def open(self, episode: Episode) -> ProgramConversation:
        return ProgramConversation(self, episode)

    async def run(self, episode: Episode, endpoint: Endpoint) -> Any:
        if inspect.iscoroutinefunction(self.program):
            return await self.program(episode, endpoint, self.job)
        return await self._threads.run(self.program, episode, endpoint, self.job)


class ProgramConversation:
    """Implements rolemesh.agents.environment.Conversation."""

    def __init__(self, programs: Programs, episode: Episode) -> None:
        self._programs = programs
        self._episode = episode
        self._session = ProgramSession()
        self._serving = AsyncExitStack()
        self._running: asyncio.Task[Any] | None = None
        self._num_turns = 0
        self._new: Chat | Prompt = []  # messages or prompt of the last call

    async def begin(self) -> Prompt:
        endpoint = await self._serving.enter_async_context(self._programs.server.serving(self._session))
        self._running = asyncio.create_task(without_exit(self._programs.run(self._episode, endpoint)))
        self._running.add_done_callback(look_at)
        if await self._next() is None:
            self._result()
            raise EnvironmentFailed(self._with_refusal("the program ended without a call that was answered"))
        assert isinstance(self._new, Prompt), "the first call is one"
        return self._new

    async def act(self, turn: dict[str, Any]) -> Observation:
        self._num_turns += 1
        finds_calls = self._session.finds_calls
        self._session.answer(utterance_of(turn, self._num_turns, finds_calls=finds_calls))
        if (call := await self._next()) is None:
            self._result()  # raises, if the program failed
            return Observation(done=True, why="ended")
        if isinstance(self._new, Prompt):
            return Observation(prompt=self._new, max_tokens=call.max_tokens)
        return Observation(messages=self._new, max_tokens=call.max_tokens)

    async def close(self) -> Outcome:
        """Refuse the program's further calls, wait for its reward, and release its resources."""
        running = self._running
        if running is None:
            await self._serving.aclose()
            return Outcome()
        try:
            self._session.end()
            await asyncio.wait({running})
            return self._at_limit() or self._result()
        finally:
            running.cancel()
            await self._serving.aclose()

    def _at_limit(self) -> Outcome | None:
        """Return the job's `reward_at_limit` if the program failed because of a limit and the job sets one."""
        assert self._running is not None
        reward = self._programs.job.rollout.agent.external.reward_at_limit
        if self._running.cancelled() or self._running.exception() is None or not self._session.is_at_limit:
            return None
        return None if reward is None else Outcome(reward)

    async def _next(self) -> ChatRequest | None:
        """Return the program's next call; None if the program has ended."""
        assert self._running is not None
        asking = asyncio.ensure_future(self._session.next())
        try:
            await asyncio.wait({asking, self._running}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the program hangs, or the episode is closed
            self._running.cancel()
            raise
        finally:
            asking.cancel()
        if not asking.done() or asking.cancelled():
            return None
        call, self._new = asking.result()
        return call

    def _result(self) -> Outcome:
        """Return the program's result.

        Raises:
            EnvironmentFailed: the program raised, or returned no reward.
        """
        assert self._running is not None
        if self._running.cancelled():
            raise EnvironmentFailed(
                self._with_refusal("the program was ended, because it hung or nobody waited for it")
            )
        error = self._running.exception()
        if isinstance(error, RolemeshError):
            raise type(error)(self._with_refusal(str(error))) from error
        if error is not None:
            raise EnvironmentFailed(
                self._with_refusal(f"the program raised {type(error).__name__}: {error}")
            ) from error
        result = self._running.result()
        numbers = dict(result) if isinstance(result, Mapping) else {"reward": result}
        if numbers.get("reward") is None:
            raise EnvironmentFailed(
                self._with_refusal(
                    f"the program returned {result!r:.200}; the reward, or a dict with it, expected"
                )
            )
        return Outcome(numbers.pop("reward"), numbers)

    def _with_refusal(self, said: str) -> str:
        refused = self._session.refused
        return f"{said}; its last call that was refused: {refused}" if refused else said
