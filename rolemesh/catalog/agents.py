"""Agents: what answers the policy's turns in a row's conversation, by the row's agent_name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rolemesh.catalog.catalog import Catalog, Declaration


@dataclass(frozen=True, kw_only=True)
class AgentSpec(Declaration):
    """An agent. `code` takes the job and returns a rolemesh.agents.environment.Agent, in the environment role.

    Args:
        converses: it has an environment. False: a row has one turn, and nobody answers it.
        speaks_first: its conversations begin with messages of the environment, after the row's prompt.
        calls: a program holds its conversations, and calls the policy as an OpenAI-compatible API. `code` takes
            the rolemesh.agents.environment.Episode, its Endpoint and the job. It returns the reward, or a dict
            with it and further numbers, and may be async.
    """

    kind: ClassVar[str] = "agent"

    converses: bool = True
    speaks_first: bool = False
    calls: bool = False

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("episode", "endpoint", "job") if self.calls else ("job",), ()


def no_environment(job: object) -> None:
    """The code of an agent whose rows have one turn."""


ONE_TURN = "single_turn_agent"  # verl's name
ENVIRONMENT = "rolemesh.services.environment.agents"

AGENTS = Catalog(
    AgentSpec,
    AgentSpec(name=ONE_TURN, code=no_environment, converses=False, meaning="one turn, which nobody answers"),
    AgentSpec(
        name="tool_agent",
        code=f"{ENVIRONMENT}.tool_agent:ToolAgent",
        meaning="calls tools until it answers without a call; an interaction may answer that",
    ),
    AgentSpec(
        name="react_agent",
        code=f"{ENVIRONMENT}.react_agent:ReactAgent",
        meaning="calls tools until it answers without a call",
    ),
    AgentSpec(
        name="math_expression",
        code=f"{ENVIRONMENT}.react_agent:MathExpression",
        meaning="react_agent with one tool, which computes the operator a @ b = 3a - 2b",
    ),
    AgentSpec(
        name="external",
        code=f"{ENVIRONMENT}.external:run_command",
        calls=True,
        meaning="a program of yours calls the policy as an OpenAI-compatible API",
    ),
)
