"""A plug-in for benchmarks/agents.py: an agent that answers after a wait, as a slow tool does."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

from rolemesh.agents.environment import Chat, Episode, Observation, Outcome
from rolemesh.config import JobConfig
from rolemesh.plugins import agent

MAX_TURNS = 8


@agent("waits")
class Waits:
    """Answers 1 to 8 turns, each after a wait of up to the environment variable WAIT_S, in seconds."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, job: JobConfig) -> None:
        self._longest_s = float(os.environ["WAIT_S"])

    def open(self, episode: Episode) -> Waiting:
        return Waiting(random.Random(episode.seed), self._longest_s)


class Waiting:
    def __init__(self, draw: random.Random, longest_s: float) -> None:
        self._draw = draw
        self._longest_s = longest_s
        self._turns_left = draw.randint(1, MAX_TURNS)

    async def begin(self) -> Chat:
        return []

    async def act(self, turn: dict[str, Any]) -> Observation:
        await asyncio.sleep(self._draw.random() * self._longest_s)
        self._turns_left -= 1
        if not self._turns_left:
            return Observation(done=True, why="answered")
        return Observation([{"role": "user", "content": "go on"}])

    async def close(self) -> Outcome:
        return Outcome()
