"""tool_agent: runs the tools that the policy calls.

A turn without a call ends the conversation, unless the row has an interaction, which then answers as a user
would.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolemesh.agents.environment import Chat, Episode, Observation, Outcome, ToolUse
from rolemesh.agents.interactions import BaseInteraction
from rolemesh.agents.tools import BaseTool, WrongArguments
from rolemesh.agents.truncation import truncated
from rolemesh.config import JobConfig
from rolemesh.config.rollout import MultiTurnConfig
from rolemesh.errors import EnvironmentFailed, InvalidData
from rolemesh.services.environment.interactions.interaction_set import interactions_of
from rolemesh.services.environment.timeouts import TookTooLong, within
from rolemesh.services.environment.tools.tool_set import (
    FunctionTool,
    ToolResult,
    executed,
    schema_of,
    started,
    tools_of,
)
from rolemesh.tasks import gather

# Share of rollout.multi_turn.call_timeout_s for a tool. The rest is time to report the error of a tool that
# hangs.
TOOL_SHARE = 0.9
NO_TOOL = "none"  # name of a tool that does not exist, or that a malformed call does not tell


class ToolAgent:
    """Implements rolemesh.agents.environment.Agent.

    Args:
        job: its section rollout.multi_turn has the limits.
        tools: by name; None: those that rollout.multi_turn names.
        interactions: by name; None: those of rollout.multi_turn.interaction_config_path.

    Raises:
        InvalidConfig: one of them cannot be made.
    """

    def __init__(
        self,
        job: JobConfig,
        tools: Mapping[str, BaseTool] | None = None,
        interactions: Mapping[str, BaseInteraction] | None = None,
    ) -> None:
        self.settings = job.rollout.multi_turn
        self.known = tools_of(job) if tools is None else tools
        self.interactions = interactions_of(job) if interactions is None else interactions

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return [schema_of(tool) for tool in self.known.values()]

    def open(self, episode: Episode) -> ToolConversation:
        extra = episode.row.get("extra_info") or {}
        if not isinstance(extra, Mapping):
            raise InvalidData(f"extra_info should be a dict; got {extra!r:.200}")
        return ToolConversation(self, episode, self._tools_kwargs(extra), *self._interaction(extra))

    def _tools_kwargs(self, extra: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        given = extra.get("tools_kwargs") or {}
        if not isinstance(given, Mapping):
            raise InvalidData(f"extra_info.tools_kwargs should be a dict of dicts by tool; got {given!r:.200}")
        # Parquet fills in None for the tools that other rows have.
        named = {name: kwargs for name, kwargs in given.items() if kwargs is not None}
        for name, kwargs in named.items():
            if name not in self.known:
                raise InvalidData(f"extra_info.tools_kwargs names the tool {name!r:.100}; {self.said_known()}")
            if not isinstance(kwargs, Mapping):
                raise InvalidData(f"extra_info.tools_kwargs.{name} should be a dict; got {kwargs!r:.200}")
        return named

    def _interaction(self, extra: Mapping[str, Any]) -> tuple[BaseInteraction | None, dict[str, Any]]:
        given = extra.get("interaction_kwargs")
        if not given:
            return None, {}
        if not isinstance(given, Mapping):
            raise InvalidData(f"extra_info.interaction_kwargs should be a dict; got {given!r:.200}")
        name = given.get("name", "gsm8k")
        if name not in self.interactions:
            known = ", ".join(self.interactions) or "no interaction"
            raise InvalidData(
                f"extra_info.interaction_kwargs.name is {name!r:.100}; there is {known} "
                "(rollout.multi_turn.interaction_config_path)"
            )
        return self.interactions[name], {key: value for key, value in given.items() if key != "name"}

    def close(self) -> None:
        """Free what the tools hold for all episodes."""
        for tool in self.known.values():
            if hasattr(tool, "close"):  # verl's have none
                tool.close()

    def said_known(self) -> str:
        return f"the tools are {', '.join(self.known)}" if self.known else "there are no tools"


@dataclass
class _Answered:
    """The answer to one call: its message, and the use of the tool."""

    message: dict[str, Any]
    use: ToolUse
    reward: float = 0.0


class ToolConversation:
    """Implements rolemesh.agents.environment.Conversation."""

    def __init__(
        self,
        agent: ToolAgent,
        episode: Episode,
        tools_kwargs: Mapping[str, Mapping[str, Any]],
        interaction: BaseInteraction | None,
        interaction_kwargs: dict[str, Any],
    ) -> None:
        self._agent = agent
        self._tools_kwargs = tools_kwargs
        self._interaction = interaction
        self._interaction_kwargs = interaction_kwargs
        self._messages: Chat = list(episode.messages)
        self._id = uuid.uuid4().hex
        self._started: dict[str, BaseTool] = {}
        self._is_interacting = False
        self._num_calls = 0

    @property
    def _settings(self) -> MultiTurnConfig:
        return self._agent.settings

    async def begin(self) -> Chat:
        for name in self._tools_kwargs:
            await self._start(self._agent.known[name])
        if self._interaction is not None:
            self._is_interacting = True
            await self._interaction.start_interaction(self._id, **self._interaction_kwargs)
        return []

    async def act(self, turn: dict[str, Any]) -> Observation:
        self._messages.append(turn)
        if calls := turn.get("tool_calls"):
            said = await self._run(calls)
        elif self._interaction is not None:
            said = await self._reply(self._interaction)
        else:
            return Observation(done=True, why="answered")
        self._messages += said.messages
        return said

    async def close(self) -> Outcome:
        """Release every tool and the interaction, also if one fails. The reward is the sum of their scores.

        Raises:
            EnvironmentFailed: with the errors of all that failed.
        """
        scores: dict[str, float] = {}
        errors: list[str] = []
        for name, tool in self._started.items():
            kwargs = self._tools_kwargs.get(name, {})
            try:
                scores[f"tool_reward/{name}"] = await tool.calc_reward(
                    self._id, **_dict(kwargs, "calc_reward_kwargs")
                )
            except Exception as error:
                errors.append(f"tool {name}: calc_reward: {_said(error)}")
            try:
                await tool.release(self._id, **_dict(kwargs, "release_kwargs"))
            except Exception as error:
                errors.append(f"tool {name}: release: {_said(error)}")
        if self._interaction is not None and self._is_interacting:
            try:
                scores["interaction_score"] = await self._interaction.calculate_score(self._id)
                await self._interaction.finalize_interaction(self._id)
            except Exception as error:
                errors.append(f"interaction {self._interaction.name}: {_said(error)}")
        if errors:
            raise EnvironmentFailed("; ".join(errors))
        return Outcome(sum(scores.values()), {**scores, "num_tool_calls": self._num_calls})

    # ---------------------------------------------------------------------------------- tools

    async def _run(self, calls: Sequence[Mapping[str, Any]]) -> Observation:
        """Run the calls of a turn concurrently, and return the answers in the order of the calls."""
        for name in dict.fromkeys(
            call["function"]["name"] for call in calls[: self._settings.max_parallel_calls]
        ):
            if name in self._agent.known and name not in self._started:
                await self._start(self._agent.known[name])
        answered = await gather(*(self._answer(call, index) for index, call in enumerate(calls)))
        return Observation(
            messages=[each.message for each in answered],
            reward=sum(each.reward for each in answered),
            tools=[each.use for each in answered],
        )

    async def _start(self, tool: BaseTool) -> None:
        if isinstance(tool, FunctionTool):  # has no state
            return
        self._started[tool.name] = tool
        kwargs = _dict(self._tools_kwargs.get(tool.name, {}), "create_kwargs")
        await started(tool, self._id, kwargs)

    async def _answer(self, call: Mapping[str, Any], index: int) -> _Answered:
        name = call["function"]["name"]
        most = self._settings.max_parallel_calls
        tool = self._agent.known.get(name)
        if call.get("malformed"):  # its name cannot be read either
            return self._failed(call, name or NO_TOOL, f"the call cannot be read: {call['malformed']}")
        if tool is None:
            return self._failed(call, NO_TOOL, f"there is no tool {name!r:.100}; {self._agent.said_known()}")
        if index >= most:
            return self._failed(call, name, f"at most {most} calls in a turn are run, so this one was not")
        began = time.perf_counter()
        seconds = TOOL_SHARE * self._settings.call_timeout_s
        kwargs = _dict(self._tools_kwargs.get(name, {}), "execute_kwargs")
        self._num_calls += 1
        try:
            answer: ToolResult = await within(
                seconds, executed(tool, self._id, dict(call["function"]["arguments"]), kwargs)
            )
        except Exception as error:
            said = str(error) if isinstance(error, TookTooLong | WrongArguments) else _said(error)
            said = said.encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
            if self._settings.on_tool_error == "fail" and not isinstance(error, WrongArguments):
                raise EnvironmentFailed(f"tool {name}: {said}") from error
            return self._failed(call, name, said, time.perf_counter() - began)
        use = ToolUse(name, time.perf_counter() - began)
        return _Answered(self._message(call, answer.text), use, answer.reward)

    def _failed(self, call: Mapping[str, Any], tool: str, error: str, seconds: float = 0.0) -> _Answered:
        return _Answered(self._message(call, f"Error: {error}"), ToolUse(tool, seconds, error))

    def _message(self, call: Mapping[str, Any], text: str) -> dict[str, Any]:
        most = self._settings.max_tool_response_length
        side = self._settings.tool_response_truncate_side
        return {
            "role": "tool",
            "content": truncated(text, most, side),
            "name": call["function"]["name"] or NO_TOOL,  # some chat templates require a name
            "tool_call_id": call["id"],
        }

    # ---------------------------------------------------------------------------- interactions

    async def _reply(self, interaction: BaseInteraction) -> Observation:
        ends, text, reward, _ = await interaction.generate_response(
            self._id, list(self._messages), **self._interaction_kwargs
        )
        if ends:
            return Observation(reward=reward, done=True, why="interaction ended")
        return Observation(messages=[{"role": "user", "content": text}], reward=reward)


def _dict(kwargs: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the arguments of one method of a tool, without None, which Parquet fills in for other rows."""
    given = kwargs.get(key) or {}
    if not isinstance(given, Mapping):
        raise InvalidData(f"extra_info.tools_kwargs: {key} should be a dict; got {given!r:.200}")
    return {name: value for name, value in given.items() if value is not None}


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
