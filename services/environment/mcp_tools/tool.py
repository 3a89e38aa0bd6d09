"""Makes the tools of MCP servers tools of tool_agent."""

from __future__ import annotations

import json
from typing import Any

from mcp_types import (
    CallToolResult,
    EmbeddedResource,
    JSONRPCRequest,
    TextContent,
    TextResourceContents,
    Tool,
)

from rolemesh.agents.tools import BaseTool, FunctionSchema, ToolResponse, ToolSchema, WrongArguments
from rolemesh.config.rollout import MultiTurnConfig
from rolemesh.config.yaml_file import one_line
from rolemesh.errors import InvalidConfig
from rolemesh.services.environment.mcp_tools.mcp_servers import Servers, said
from rolemesh.services.environment.tools.argument_schema import Arguments


class ToolError(Exception):
    """The tool answered with an error, or could not be called."""


class McpTool(BaseTool):
    """A tool of a server. It keeps no state for an episode.

    Raises:
        InvalidConfig: its name or its schema is invalid.
    """

    def __init__(self, servers: Servers, server: str, tool: Tool) -> None:
        try:
            function = FunctionSchema(
                name=tool.name, description=tool.description or "", parameters=tool.input_schema
            )
            self._arguments = Arguments(tool.input_schema)
        except ValueError as error:
            raise InvalidConfig(
                f"rollout.multi_turn.mcp_servers.{server}: tool {tool.name!r:.100} has no valid schema: "
                f"{one_line(str(error))}"
            ) from error
        super().__init__({}, ToolSchema(type="function", function=function))
        self._servers = servers
        self._server = server

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        self._arguments.check(parameters)
        _check_that_json_has(self.name, parameters)
        try:
            result = await self._servers.call(self._server, self.name, parameters)
        except Exception as error:
            raise ToolError(f"MCP server {self._server}: {said(error)}") from error
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text)
        return ToolResponse(text=text), 0.0, {}

    def close(self) -> None:
        self._servers.close()


def mcp_tools(settings: MultiTurnConfig) -> list[BaseTool]:
    """Connect to the job's servers, and return their tools.

    Raises:
        InvalidConfig: a server cannot be reached, or a tool is invalid.
    """
    servers = Servers(settings.mcp_servers, settings.call_timeout_s)
    listed = servers.start()
    try:
        return [McpTool(servers, name, tool) for name, tools in listed.items() for tool in tools]
    except BaseException:
        servers.close()
        raise


def _check_that_json_has(name: str, parameters: dict[str, Any]) -> None:
    """Refuse arguments that the transport cannot write. Its failure would end the session of all calls.

    Raises:
        WrongArguments: they have 255 levels of nesting.
    """
    params = {"name": name, "arguments": parameters, "_meta": {}}
    try:
        JSONRPCRequest(jsonrpc="2.0", id=0, method="tools/call", params=params).model_dump_json()
    except ValueError as error:
        raise WrongArguments(f"the arguments cannot be sent: {one_line(str(error))}") from error


def _text_of(result: CallToolResult) -> str:
    """Return an answer as text: its parts, and its structured content unless a text repeats it."""
    parts = [_part_of(each) for each in result.content]
    structured = result.structured_content
    if structured is not None and not _repeats(parts, structured):
        parts.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(parts)


def _part_of(content: Any) -> str:
    """Return a text, also of an embedded resource; of anything else, such as a picture, the kind."""
    if isinstance(content, EmbeddedResource) and isinstance(content.resource, TextResourceContents):
        return content.resource.text
    return content.text if isinstance(content, TextContent) else f"({content.type})"


def _repeats(parts: list[str], structured: Any) -> bool:
    """Return whether texts say the same as structured content: one says all of it, or each says an item.

    The protocol's libraries write both, and put a result that is no object under the key `result`.
    """
    wrapped = isinstance(structured, dict) and structured.keys() == {"result"}
    values = [_value_of(part) for part in parts]
    wanted = [structured, structured["result"]] if wrapped else [structured]
    return bool(parts) and any(each in wanted for each in (*parts, *values, parts, values))


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
