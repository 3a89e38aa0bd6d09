"""Text environments of gymnasium as agents.

    # my_games.py
    import gymnasium
    from rolemesh.agents.gymnasium import gymnasium_agent
    from rolemesh.plugins import agent

    agent("my_game", speaks_first=True)(gymnasium_agent(lambda: gymnasium.make("MyGame-v0")))

Each episode has an environment of its own. Its reset gets the episode's seed, and the row's
extra_info.env_kwargs as options. The first observation is a message of the user, each turn of the policy is an
action, and each observation answers it. The library `gymnasium` is the plug-in's: nothing here imports it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rolemesh.agents.environment import Agent, Chat, Conversation, Episode, Observation, Outcome
from rolemesh.errors import InvalidData

SEEDS = 1 << 32  # gymnasium's own take a seed below this
RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")


def gymnasium_agent(make_env: Callable[[], Any], *, threads: int = 8) -> Callable[[Any], Agent]:
    """Make an agent of a gymnasium environment, for the decorator `agent`.

    Args:
        make_env: returns a new environment whose observations and actions are texts (gymnasium.spaces.Text).
            It is called once in each episode.
        threads: environments of a replica that compute at the same time.
    """

    def agent(job: Any) -> Agent:
        return GymnasiumAgent(make_env, threads)

    return agent


class GymnasiumAgent:
    """Implements rolemesh.agents.environment.Agent."""

    tools = ()

    def __init__(self, make_env: Callable[[], Any], threads: int) -> None:
        self._make_env = make_env
        self._threads = ThreadPoolExecutor(threads, "gymnasium")

    def open(self, episode: Episode) -> Conversation:
        """Make an episode's conversation. Raises InvalidData if the row's env_kwargs are no dict."""
        options = (episode.row.get("extra_info") or {}).get("env_kwargs")
        if options is not None and not isinstance(options, Mapping):
            raise InvalidData(f"extra_info.env_kwargs should be a dict; got {options!r:.200}")
        # Parquet fills in None for what other rows have.
        options = {name: value for name, value in (options or {}).items() if value is not None}
        return GymnasiumConversation(self._make_env, self._threads, episode.seed % SEEDS, options)

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class GymnasiumConversation:
    """Implements rolemesh.agents.environment.Conversation. A turn's reward is its step's."""

    def __init__(
        self, make_env: Callable[[], Any], threads: ThreadPoolExecutor, seed: int, options: dict[str, Any]
    ) -> None:
        self._make_env = make_env
        self._threads = threads
        self._seed = seed
        self._options = options
        self._env: Any = None
        self._resetting: Future[Any] | None = None

    async def begin(self) -> Chat:
        self._resetting = self._threads.submit(_called, self._reset)
        return _as_chat(await asyncio.wrap_future(self._resetting))

    async def act(self, turn: dict[str, Any]) -> Observation:
        returned = await self._run(self._env.step, turn["content"])
        observation, reward, terminated, truncated, _ = _parts(returned, "step", STEP)
        if terminated or truncated:
            return Observation(reward=reward, done=True, why="terminated" if terminated else "truncated")
        return Observation(messages=_as_chat(observation), reward=reward)

    async def close(self) -> Outcome:
        if self._resetting is not None and not self._resetting.done():  # begin was cancelled
            self._resetting.add_done_callback(lambda _: self._close_env())
        elif self._env is not None:
            await self._run(self._close_env)
        return Outcome()

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()

    def _reset(self) -> Any:
        self._env = self._make_env()
        observation, _ = _parts(self._env.reset(seed=self._seed, options=self._options), "reset", RESET)
        return observation

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, _called, function, *args)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except StopIteration as error:  # a future cannot raise it
        raise RuntimeError("it raised StopIteration") from error


def _parts(returned: Any, method: str, names: Sequence[str]) -> Sequence[Any]:
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        raise TypeError(
            f"{method} should return ({', '.join(names)}), as gymnasium's environments do; it returned "
            f"{returned!r:.200}"
        )
    return returned


def _as_chat(observation: Any) -> Chat:
    if not isinstance(observation, str):
        raise TypeError(f"an observation should be a text; the environment returned {observation!r:.200}")
    return [{"role": "user", "content": observation}]
