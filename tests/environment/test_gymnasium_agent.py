"""Environments of gymnasium as agents, over the real servicer: numbers worked by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from environments import closing, job_with, opening, turn
from serving import served

from rolemesh.catalog.plugin_imports import forget
from rolemesh.errors import EnvironmentFailed, InvalidData
from rolemesh.methods import methods
from rolemesh.rpc.calling.episodes import EnvironmentClient

PLUGIN = '''
import time
from pathlib import Path

import gymnasium
from gymnasium.spaces import Text

from rolemesh.agents.gymnasium import gymnasium_agent
from rolemesh.plugins import agent


class Guess(gymnasium.Env):
    """Find a number below 100 in five guesses."""

    observation_space = action_space = Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if "alone" in options:
            return "a number"
        self.below = options.get("below", 100)
        self.number = int(self.np_random.integers(self.below))
        self.folder = options.get("folder")
        while self.folder and not Path(self.folder, "go").exists():
            time.sleep(0.01)
        return f"a number below {self.below}", {}

    def step(self, action):
        if action == "number":
            return 7, 0.0, False, False, {}
        if action == "four":
            return "wrong", 0.0, False, {}
        if action == "unpaid":
            return "wrong", None, False, False, {}
        if action == "next":
            return next(iter(())), 0.0, False, False, {}
        if action == "tell":
            return str(self.number), -0.5, False, False, {}
        if int(action) == self.number:
            return "right", 1.0, True, False, {}
        return "wrong", -0.25, False, True, {}

    def close(self):
        if self.folder:
            Path(self.folder, "closed").touch()


agent("guess", speaks_first=True)(gymnasium_agent(Guess))
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "guess.py").write_text(PLUGIN)
    yield str(tmp_path / "guess.py")
    forget(str(tmp_path / "guess.py"))


@asynccontextmanager
async def guessing(
    tmp_path: Path, model: Path, plugin: str, **multi_turn: Any
) -> AsyncIterator[EnvironmentClient]:
    sections = {"plugins": [plugin], "rollout": {"agent": {"default_agent_loop": "guess"}}}
    job = job_with(tmp_path, model, sections, **multi_turn)
    async with served("environment", job) as addresses, EnvironmentClient(addresses, methods(job)) as client:
        await client.wait_until_ready(120)
        yield client


async def test_steps_are_turns_and_their_rewards(tiny_model: Path, tmp_path: Path, plugin: str) -> None:
    async with guessing(tmp_path, tiny_model, plugin) as client:
        observed = {}
        for name, seed in (("a", 7), ("b", 7), ("c", 2**64 - 1)):
            begun = await client.open_episode(
                opening(name, "guess", seed=seed, env_kwargs={"below": 50, "x": None})
            )
            assert [(m.role, m.content) for m in begun.messages] == [("user", "a number below 50")]
            answer = await client.act(turn(name, 1, "tell"))
            assert (answer.reward, answer.done) == (-0.5, False)
            observed[name] = answer.messages[0].content
        assert observed["a"] == observed["b"]  # of one seed
        last = await client.act(turn("a", 2, observed["a"]))
        assert (last.reward, last.done, last.why) == (1.0, True, "terminated")
        last = await client.act(turn("b", 2, "-1"))
        assert (last.reward, last.done, last.why) == (-0.25, True, "truncated")
        assert [(await client.close_episode(closing(name))).reward for name in observed] == [0.0] * 3


async def test_a_non_text_observation_and_an_exception_name_the_row(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    async with guessing(tmp_path, tiny_model, plugin) as client:
        await client.open_episode(opening("a", "guess"))
        with pytest.raises(
            EnvironmentFailed, match=r"row row-a .*an observation should be a text; .* returned 7"
        ):
            await client.act(turn("a", 1, "number"))
        await client.open_episode(opening("b", "guess"))
        with pytest.raises(EnvironmentFailed, match=r"row row-b .*ValueError: invalid literal"):
            await client.act(turn("b", 1, "two"))
        await client.open_episode(opening("d", "guess"))
        with pytest.raises(EnvironmentFailed, match=r"row row-d .*it raised StopIteration"):
            await client.act(turn("d", 1, "next"))
        with pytest.raises(InvalidData, match=r"row row-c .*env_kwargs should be a dict; got \[1\]"):
            await client.open_episode(opening("c", "guess", env_kwargs=[1]))


async def test_wrong_results_of_reset_and_step_name_the_expected_ones(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    async with guessing(tmp_path, tiny_model, plugin) as client:
        with pytest.raises(
            EnvironmentFailed,
            match=r"row row-a .*reset should return \(observation, info\).*returned 'a number'",
        ):
            await client.open_episode(opening("a", "guess", env_kwargs={"alone": True}))
        await client.open_episode(opening("b", "guess"))
        with pytest.raises(
            EnvironmentFailed, match=r"row row-b .*step should return \(observation, reward, terminated, trunc"
        ):
            await client.act(turn("b", 1, "four"))
        await client.open_episode(opening("c", "guess"))
        with pytest.raises(EnvironmentFailed, match=r"row row-c .*the reward is None; a finite number"):
            await client.act(turn("c", 1, "unpaid"))


async def test_an_environment_whose_reset_ends_too_late_is_closed(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    async with guessing(tmp_path, tiny_model, plugin, call_timeout_s=3) as client:
        with pytest.raises(EnvironmentFailed, match=r"row row-a .*begin: it took longer than 3 s"):
            await client.open_episode(opening("a", "guess", env_kwargs={"folder": str(tmp_path)}))
        assert not (tmp_path / "closed").exists()
        (tmp_path / "go").touch()
        async with asyncio.timeout(60):
            while not (tmp_path / "closed").exists():  # noqa: ASYNC110  # a thread's work
                await asyncio.sleep(0.01)
