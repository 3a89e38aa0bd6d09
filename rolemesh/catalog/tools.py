"""Tools that tool_agent offers to the policy, by the name that the job and the policy give them."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import ClassVar

from rolemesh.catalog.catalog import Catalog, Declaration


@dataclass(frozen=True, kw_only=True)
class ToolSpec(Declaration):
    """A tool. `code` is a function, or a class of the shape of rolemesh.agents.tools.BaseTool.

    A function may be async. Its signature and its docstring (Google's style, with Args) are the tool's schema.
    A call whose arguments do not fit the schema is refused. What it returns is the tool's answer: a text,
    nothing (None), or anything else as JSON.

    Args:
        of_job: `code` is a class of that shape which takes the job, in place of a config and a schema.
    """

    kind: ClassVar[str] = "tool"

    of_job: bool = False

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if self.of_job:
            return ("job",), ()
        return (), tuple(signature(self.load()).parameters)  # the tool's own: the policy fills them in


TOOLS = Catalog(
    ToolSpec,
    ToolSpec(
        name="calculator",
        code="rolemesh.services.environment.tools.calculator:calculator",
        meaning="exact arithmetic with integers and decimals",
    ),
    ToolSpec(
        name="calc_gsm8k_reward",
        code="rolemesh.services.environment.tools.gsm8k_tool:Gsm8kTool",
        meaning="tells the policy whether its answer to a row of GSM8K is right",
    ),
    ToolSpec(
        name="python",
        code="rolemesh.services.environment.tools.python:PythonTool",
        of_job=True,
        meaning="a sandboxed Python interpreter that keeps its variables within an episode",
    ),
)
