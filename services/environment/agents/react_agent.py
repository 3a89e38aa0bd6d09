"""react_agent and math_expression, verl's example loops: thought and calls, until a turn without a call."""

from __future__ import annotations

from rolemesh.config import JobConfig
from rolemesh.services.environment.agents.tool_agent import ToolAgent
from rolemesh.services.environment.running import Threads
from rolemesh.services.environment.tools.loading import FunctionTool, tools_of
from rolemesh.services.environment.tools.own_operator import calculate


class ReactAgent(ToolAgent):
    """The job's tools, and no interaction: a turn without a call is the answer.

    Raises:
        InvalidConfig: a tool cannot be made.
    """

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job, tools_of(job), {})


class MathExpression(ToolAgent):
    """The tool calculate alone, with the operator @; the job's tools are not offered."""

    def __init__(self, job: JobConfig) -> None:
        super().__init__(job, {"calculate": FunctionTool("calculate", calculate, Threads())}, {})
