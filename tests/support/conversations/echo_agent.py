"""A plug-in with two agents for tests. Jobs name it (echoing.py); tests do not import it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

from rolemesh.agents.environment import Chat, Episode, Observation, Outcome, Prompt, ToolUse
from rolemesh.config import JobConfig
from rolemesh.plugins import agent


@agent("echo", meaning="says how long a turn was")
class Echo:
    """Measures each turn with a tool and says how long it was, after a random time; ends at an odd length."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, job: JobConfig) -> None:
        pass

    def open(self, episode: Episode) -> EchoTalk:
        return EchoTalk(episode)


class EchoTalk:
    def __init__(self, episode: Episode) -> None:
        self._uid, self._characters = episode.uid, 0

    async def begin(self) -> Chat:
        return []

    async def act(self, turn: dict[str, Any]) -> Observation:
        await asyncio.sleep(random.random() / 50)  # answers come in another order every time
        self._characters += (length := len(turn["content"]))
        ruler = ToolUse("ruler", seconds=length / 1000, error="too long" if length > 20 else "")
        if length % 2:
            return Observation(done=True, why="odd", reward=0.25, tools=[ruler])
        return Observation([{"role": "user", "content": f"{length}!"}], reward=0.5, tools=[ruler])

    async def close(self) -> Outcome:
        return Outcome(reward=1.0, metrics={"characters": float(self._characters)})


@agent("riddler", speaks_first=True, meaning="an echo that speaks first")
class Riddler(Echo):
    """Speaks first, differently to each row."""

    def open(self, episode: Episode) -> RiddlerTalk:
        return RiddlerTalk(episode)


class RiddlerTalk(EchoTalk):
    def __init__(self, episode: Episode) -> None:
        super().__init__(episode)
        self._seed = episode.seed

    async def begin(self) -> Chat:
        return [{"role": "user", "content": f"[{self._seed % 1000}]"}]


@agent("stutterer", meaning="an echo that answers twice")
class Stutterer(Echo):
    def open(self, episode: Episode) -> StutterersTalk:
        return StutterersTalk(episode)


class StutterersTalk(EchoTalk):
    async def act(self, turn: dict[str, Any]) -> Observation:
        return Observation([{"role": "user", "content": "what?"}] * 2)


@agent("director", meaning="gives the policy a prompt with a message of the system")
class Director(Echo):
    def open(self, episode: Episode) -> DirectorsTalk:
        return DirectorsTalk(episode)


class DirectorsTalk(EchoTalk):
    async def act(self, turn: dict[str, Any]) -> Observation:
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "what?"}]
        return Observation(prompt=Prompt(chat))


@agent("condenser", meaning="an echo that lets the policy see a summary alone")
class Condenser(Echo):
    """Gives the policy another prompt after each turn."""

    def open(self, episode: Episode) -> CondenserTalk:
        return CondenserTalk(episode)


class CondenserTalk(EchoTalk):
    async def act(self, turn: dict[str, Any]) -> Observation:
        said = await super().act(turn)
        summary = f"{self._characters} so far. {'Go on. ' * (self._characters % 5)}"
        return replace(said, done=False, messages=[], prompt=Prompt([{"role": "user", "content": summary}]))
