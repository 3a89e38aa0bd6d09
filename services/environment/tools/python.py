"""The tool python: a sandboxed interpreter, which keeps its variables within an episode."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from rolemesh.agents.tools import BaseTool, FunctionSchema, ToolResponse, ToolSchema, WrongArguments
from rolemesh.config import JobConfig
from rolemesh.errors import InvalidConfig
from rolemesh.sandbox.box import ProgramLimits, SandboxUnavailable
from rolemesh.sandbox.interpreter import Interpreter, Interpreters, ProgramOutput

CALL_SHARE = 0.8  # of rollout.multi_turn.call_timeout_s; the rest is time to report a call's end
SPARE_OUTPUT = 1 << 16  # bytes of output beyond what the policy sees
FRESH = "(A fresh interpreter: the variables of earlier calls are lost.)\n"

SCHEMA = FunctionSchema(
    name="python",
    description=(
        "Run Python code. Variables stay from one call to the next. Returns what the code prints, and the "
        "value of a last expression. There is the standard library alone, and no file and no network."
    ),
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
    },
)


@dataclass
class _Episode:
    """An episode; `interpreter` is None before the first call, and after the interpreter was lost."""

    interpreter: Interpreter | None = None
    was_lost: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # calls of a turn run in their order


class PythonTool(BaseTool):
    """Runs an episode's code in a process of its own, without rights (docs/reward-guarantees.md).

    Args:
        job: reward.sandbox has the limits of memory and of a call's CPU seconds.

    Raises:
        InvalidConfig: this machine cannot run the sandbox.
    """

    def __init__(self, job: JobConfig) -> None:
        super().__init__({}, ToolSchema(type="function", function=SCHEMA))
        limits = job.reward.sandbox
        settings = job.rollout.multi_turn
        self._limits = ProgramLimits(
            cpu_s=limits.timeout_s,
            wall_s=min(2 * limits.timeout_s, CALL_SHARE * settings.call_timeout_s),
            memory_bytes=limits.memory_limit_mb << 20,
            output_bytes=4 * settings.max_tool_response_length + SPARE_OUTPUT,
        )
        self._episodes: dict[str, _Episode] = {}
        self._interpreters = Interpreters()
        try:
            self._interpreters.start()
        except SandboxUnavailable as error:
            raise InvalidConfig(f"rollout.multi_turn.tools names python, but {error}") from error

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        name = instance_id or ""
        self._episodes[name] = _Episode()
        return name, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        code = parameters.get("code")
        if not isinstance(code, str) or len(parameters) != 1:
            raise WrongArguments(f"python takes one argument, code, a text; it got {sorted(parameters)}")
        episode = self._episodes[instance_id]
        async with episode.turn:
            before = FRESH if episode.was_lost else ""
            said = await self._run(episode, code)
        return ToolResponse(text=before + self._text_of(said)), 0.0, {}

    async def _run(self, episode: _Episode, code: str) -> ProgramOutput:
        ended = True
        try:
            if episode.interpreter is None:
                episode.interpreter = await self._interpreters.open(self._limits)
            said = await episode.interpreter.run(code)
            ended = bool(said.ended)
        finally:
            episode.was_lost = ended
            if ended:
                _close(episode)
        return said

    def _text_of(self, said: ProgramOutput) -> str:
        text = said.output
        if said.is_cut:
            text += f"\n(Output beyond {self._limits.output_bytes} bytes is lost.)\n"
        if said.ended:
            text += f"Error: the interpreter has ended: {said.ended}. Its variables are lost.\n"
        return text or "(no output)"

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        if (episode := self._episodes.pop(instance_id, None)) is not None:
            _close(episode)

    def close(self) -> None:
        for episode in self._episodes.values():
            _close(episode)
        self._interpreters.close()


def _close(episode: _Episode) -> None:
    interpreter = episode.interpreter
    episode.interpreter = None
    if interpreter is not None:
        interpreter.close()
