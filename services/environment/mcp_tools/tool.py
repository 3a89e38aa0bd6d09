"""Makes the tools of MCP servers tools of tool_agent."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from jsonschema.protocols import Validator
from mcp_types import CallToolResult, JSONRPCRequest, TextContent, Tool
from referencing import Registry

from rolemesh.agents.tools import BaseTool, FunctionSchema, ToolResponse, ToolSchema, WrongArguments
from rolemesh.config.rollout import MultiTurnConfig
from rolemesh.config.yaml_file import one_line
from rolemesh.errors import InvalidConfig
from rolemesh.services.environment.mcp_tools.servers import Servers, said


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
            cls = jsonschema.validators.validator_for(tool.input_schema, jsonschema.Draft202012Validator)
            cls.check_schema(tool.input_schema)
        except (ValueError, jsonschema.SchemaError) as error:
            raise InvalidConfig(
                f"rollout.multi_turn.mcp_servers.{server}: tool {tool.name!r:.100} has no valid schema: "
                f"{one_line(str(error))}"
            ) from error
        super().__init__({}, ToolSchema(type="function", function=function))
        self._servers, self._server = servers, server
        self._validator: Validator = cls(tool.input_schema, registry=Registry())  # fetches no $ref

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if (wrong := next(self._validator.iter_errors(parameters), None)) is not None:
            at = "".join(f"{part}: " for part in wrong.absolute_path)
            raise WrongArguments(f"{at}{one_line(wrong.message)}")
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
        WrongArguments: a lone surrogate, or 255 levels of nesting.
    """
    params = {"name": name, "arguments": parameters, "_meta": {}}
    try:
        JSONRPCRequest(jsonrpc="2.0", id=0, method="tools/call", params=params).model_dump_json()
    except ValueError as error:
        raise WrongArguments(f"the arguments cannot be sent: {one_line(str(error))}") from error


def _text_of(result: CallToolResult) -> str:
    """Return the text of an answer, with the kind of each part that is not text, such as a picture."""
    parts = [each.text if isinstance(each, TextContent) else f"({each.type})" for each in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
