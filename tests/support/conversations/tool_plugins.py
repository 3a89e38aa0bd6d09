"""Tools and interactions of tests, and an environment's client that has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from environments import job_with, opening
from serving import served

from rolemesh.methods import methods
from rolemesh.rpc.calling.episodes import EnvironmentClient

TOOLS = '''
import asyncio
import threading
import time

from rolemesh.agents.interactions import BaseInteraction
from rolemesh.agents.tools import BaseTool, FunctionSchema, ToolResponse, ToolSchema
from rolemesh.plugins import tool


@tool("repeat")
def repeat(text: str, times: int = 2) -> str:
    """Repeat a text.

    Args:
        text: The text.
        times: How often.
    """
    return text * times


@tool("where")
async def where(unit: str) -> dict:
    """Say which thread runs.

    Args:
        unit: Ignored.
    """
    return {"main": threading.current_thread() is threading.main_thread(), "unit": unit}


@tool("slow")
def slow(seconds: float) -> str:
    """Take some time.

    Args:
        seconds: The time.
    """
    time.sleep(seconds)
    return f"slept on main: {threading.current_thread() is threading.main_thread()}"


A_HUNDRED = threading.Barrier(100)


@tool("meets")
def meets() -> str:
    """Wait until a hundred calls wait."""
    A_HUNDRED.wait(50)
    return f"met on main: {threading.current_thread() is threading.main_thread()}"


@tool("broken")
def broken(how: str) -> str:
    """Break.

    Args:
        how: Which way.
    """
    if how == "exit":
        raise SystemExit(3)
    if how == "stop":
        raise StopIteration
    raise LookupError(how)


@tool("hangs")
async def hangs() -> str:
    """Never answer."""
    await asyncio.get_running_loop().create_future()
    return ""


class Ledger(BaseTool):
    """Writes its life cycle to a list."""

    written = []

    async def create(self, instance_id=None, **kwargs):
        self.written.append(("create", kwargs))
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.written.append(("execute", parameters, kwargs))
        return ToolResponse(text="noted"), parameters.get("reward", 0.5), {}

    async def calc_reward(self, instance_id, **kwargs):
        self.written.append(("calc_reward", kwargs))
        return 2.0

    async def release(self, instance_id, **kwargs):
        self.written.append(("release", kwargs))


class OldLedger(Ledger):
    """As verl's older tools: create takes what it needs and returns a name, execute returns a text."""

    async def create(self, instance_id, ground_truth=""):
        self.written.append(("create", ground_truth))
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):
        return "noted", 0.0, {}


class PoliteInteraction(BaseInteraction):
    async def start_interaction(self, instance_id=None, *, most, **kwargs):
        self.left = most
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.left -= 1
        return self.left == 0, f"{self.config['word']}, {len(messages)}", 0.125, {}

    async def calculate_score(self, instance_id, **kwargs):
        return 4.0
'''

SCHEMA = {
    "type": "function",
    "function": {
        "name": "ledger",
        "description": "Note it.",
        "parameters": {"type": "object", "properties": {"reward": {"type": "number"}}, "required": []},
    },
}


def tools_file(directory: Path, *entries: dict[str, Any]) -> str:
    file = directory / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": list(entries)}))
    return str(file)


@asynccontextmanager
async def agent(
    tmp_path: Path,
    model: Path,
    plugins: Any = (),
    sections: Any = None,
    **multi_turn: Any,
) -> AsyncIterator[EnvironmentClient]:
    sections = {
        "plugins": [plugins] if plugins else [],
        "rollout": {"agent": {"default_agent_loop": "tool_agent"}},
        **(sections or {}),
    }
    job = job_with(tmp_path, model, sections, **multi_turn)
    async with (
        served("environment", job) as addresses,
        EnvironmentClient(addresses, methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        yield client


async def opened(client: EnvironmentClient, name: str = "a", **extra_info: Any) -> None:
    await client.open_episode(opening(name, "tool_agent", **extra_info))
