"""A plug-in: an agent whose conversations do what the policy says. Each writes every turn to its row's log."""

from __future__ import annotations

import asyncio
import os
import sys

import numpy as np

from rolemesh.agents.environment import Observation, Outcome, Prompt, ToolUse
from rolemesh.errors import InvalidData
from rolemesh.plugins import agent

ODD = {
    "negative": Observation(max_tokens=-1),
    "fraction": Observation(max_tokens=0.5),
    "array": Observation(max_tokens=np.array([5])),
    "truth": Observation(max_tokens=True),
    "no tools": Observation(tools=None),
    "array of tools": Observation(tools=np.array(5)),
    "names": Observation(tools=["x"]),
    "prompt": Observation(prompt=Prompt([], None)),
    "set": Observation(prompt=Prompt([], [{"x": {1}}])),
}


@agent("obedient", meaning="does what the policy says")
class Obedient:
    tools = ()

    def __init__(self, job):
        pass

    def open(self, episode):
        extra = episode.row.get("extra_info", {})
        if "log" not in extra:
            raise InvalidData("extra_info.log is missing")
        return Conversation(episode, extra)


class Conversation:
    def __init__(self, episode, extra):
        self.episode, self.extra, self.turns = episode, extra, 0

    def write(self, line):
        with open(self.extra["log"], "a") as file:
            file.write(f"{self.episode.uid} {line}\n")

    async def begin(self):
        self.write("begin")
        return await self.obey(self.extra.get("begin", "nothing")) or []

    async def act(self, turn):
        self.turns += 1
        self.write(f"turn {self.turns} {turn['content']}")
        said = await self.obey(turn["content"])
        return said if isinstance(said, Observation) else Observation(messages=said or [])

    async def obey(self, order):
        what, _, rest = order.partition(" ")
        if what == "say":
            return [{"role": "user", "content": f"{self.episode.seed} {self.turns} {rest}"}]
        if what == "reward":
            return Observation(reward=float(rest))
        if what == "text-reward":
            return Observation(reward="1")
        if what == "done":
            return Observation(done=True, why=rest)
        if what == "role":
            return [{"role": rest, "content": ""}]
        if what == "bytes":
            return [{"role": "user", "content": b"1"}]
        if what == "surrogate":
            return [{"role": "user", "content": "\ud800"}]
        if what == "flood":
            return [{"role": "user", "content": "x" * int(rest)}]
        if what == "messages":
            return [{"role": "user", "content": ""}] * int(rest)
        if what == "tool":
            return Observation(tools=[ToolUse(rest, 0.5, "broken")])
        if what == "odd":
            return ODD[rest]
        if what == "raise":
            raise LookupError(rest)
        if what == "exit":
            sys.exit(rest)
        if what == "none":
            return Observation(messages=None)
        if what == "nonsense":
            return 17
        if what == "hang":
            await asyncio.get_running_loop().create_future()
        if what == "resist":
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                await asyncio.get_running_loop().create_future()
        if what == "gate":  # a byte there says that the turn has begun; it goes on when it gets one
            fd = os.open(rest, os.O_RDWR)
            os.write(fd, b".")
            await asyncio.to_thread(os.read, os.open(rest + ".open", os.O_RDWR), 1)
            return [{"role": "user", "content": "passed"}]
        return []

    async def close(self):
        self.write("close")
        if "close" in self.extra:
            await self.obey(self.extra["close"])
        return Outcome(self.extra.get("outcome", 0.25), self.extra.get("metrics", {"turns": self.turns}))
