"""Tools as classes: a schema, and a life cycle within an episode. The shape is verl's BaseTool.

    class Search(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return await search(parameters["query"]), 0.0, {}

tool_agent calls `create` once in an episode, `execute` for each call of the policy, and at the end
`calc_reward` and `release`. A class of verl's own, or of a job that was written for it, works as it is.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class FunctionSchema(BaseModel):
    """A function: its name, what it does, and a JSON schema of its arguments."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = False


class ToolSchema(BaseModel):
    """A tool, as OpenAI's API takes it."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: FunctionSchema

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON, without what was left out."""
        return self.model_dump(exclude_unset=True, exclude_none=True) | {"type": "function"}


class WrongArguments(ValueError):
    """A call's arguments are wrong. The policy reads why, also with rollout.multi_turn.on_tool_error: fail."""


class ToolResponse(BaseModel):
    """The answer of a tool: a text."""

    text: str = ""


class BaseTool:
    """A tool of an episode. One object serves all episodes of a replica, and tells them apart by instance_id.

    Args:
        config: the tool's section `config` in the YAML file.
        tool_schema: its schema there; None: `get_openai_tool_schema` has it.
    """

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> ToolSchema:
        """Return the schema that the policy gets."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an episode. `kwargs` are the row's extra_info.tools_kwargs.<name>.create_kwargs."""
        return instance_id or "", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse | str, float, dict[str, Any]]:
        """Run one call. Return its answer, its reward, and numbers about it. `kwargs`: execute_kwargs.

        Raises:
            WrongArguments: the policy's mistake. Any other error is a failure of the tool.
        """
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the episode's reward. `kwargs`: calc_reward_kwargs."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Free what the episode holds. `kwargs`: release_kwargs."""

    def close(self) -> None:
        """Free what the tool holds for all episodes. Called when the role ends."""
