"""react_agent and math_expression, verl's example loops. A turn without a call ends the conversation."""

from __future__ import annotations

from rolemesh.config import JobConfig
from rolemesh.services.environment.agents.tool_agent import ToolAgent
from rolemesh.services.environment.timeouts import Threads
from rolemesh.services.environment.tools.own_operator import calculate
from rolemesh.services.environment.tools.tool_set import FunctionTool, tools_of


class ReactAgent(ToolAgent):
    """Offers the job's tools, without interactions: a turn without a call is the answer.

    Raises:
        InvalidConfig: a tool cannot be made.
    """

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job, tools_of(job), {})


class MathExpression(ToolAgent):
    """Offers only the tool calculate, with the operator @, and none of the job's tools."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job, {"calculate": FunctionTool("calculate", calculate, Threads())}, {})
