"""An environment that does what the policy says, and what calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rolemesh.config.base import merge
from rolemesh.config.job import JobConfig, make_job
from rolemesh.v1.environment_pb2 import (
    ActRequest,
    CloseEpisodeRequest,
    Message,
    OpenEpisodeRequest,
    ToolCall,
)

PLUGIN = Path(__file__).with_name("obedient.py")


def environment_job(directory: Path, model: Path, **multi_turn: Any) -> JobConfig:
    """Make a job whose default agent is `obedient`."""
    return job_with(directory, model, {"rollout": {"agent": {"default_agent_loop": "obedient"}}}, **multi_turn)


def job_with(directory: Path, model: Path, sections: dict[str, Any], **multi_turn: Any) -> JobConfig:
    """Make a job with conversations."""
    base: dict[str, Any] = {
        "plugins": [str(PLUGIN)],
        "actor": {"model": {"path": str(model)}},
        "rollout": {"multi_turn": {"enable": True, **multi_turn}},
        "trainer": {"default_local_dir": str(directory / "run"), "device": "cpu"},
    }
    return make_job(merge(base, sections))


def opening(
    name: str, agent: str = "obedient", attempt: int = 1, *, seed: int = 7, **extra_info: Any
) -> OpenEpisodeRequest:
    """Make the request that begins an episode; its row's uid is row-<name>."""
    return OpenEpisodeRequest(
        episode=name,
        attempt=attempt,
        agent=agent,
        uid=f"row-{name}",
        row=json.dumps({"data_source": "test", "reward_model": {}, "extra_info": extra_info}),
        messages=[Message(role="user", content="begin")],
        seed=seed,
    )


def turn(name: str, number: int, said: str = "", *calls: ToolCall, attempt: int = 1) -> ActRequest:
    message = Message(role="assistant", content=said, tool_calls=calls)
    return ActRequest(episode=name, attempt=attempt, turn=number, message=message)


def calling(tool: str, arguments: dict[str, Any] | str = "", *, id: str = "1", malformed: str = "") -> ToolCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=id, name=tool, arguments=text, malformed=malformed)


def closing(name: str, attempt: int = 1) -> CloseEpisodeRequest:
    return CloseEpisodeRequest(episode=name, attempt=attempt)
