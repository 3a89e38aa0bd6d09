"""The data of a run: its rows, the order of its prompts, and the tools that agents offer in them."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from rolemesh.catalog.agents import AGENTS
from rolemesh.config import JobConfig
from rolemesh.data import PromptDataset
from rolemesh.data.dataset import Agents
from rolemesh.dataproto import DataProto
from rolemesh.roles import Environment
from rolemesh.services.controller.run.row_loading import (
    Content,
    content_of,
    training_data,
    validation_data,
    warn_of_unseen_rows,
)
from rolemesh.v1.environment_pb2 import DescribeRequest

log = logging.getLogger(__name__)


class RunData:
    """Training and validation rows of a run.

    Args:
        job: the job.
        tokenizer: the model's.

    Raises:
        InvalidConfig, InvalidData: the data cannot be used.
    """

    def __init__(self, job: JobConfig, tokenizer: Any) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._tools: dict[str, list[dict[str, Any]]] = {}  # by agent; known once its environment is
        self.train, self.order, self.num_steps = training_data(job, tokenizer, self._agents)
        self.val = validation_data(job, tokenizer, self._agents)
        self._warn_of_no_conversations()
        warn_of_unseen_rows(job, len(self.train))

    def prompts(self, batch: int) -> DataProto:
        """Return the prompts of a batch, counted from 1."""
        return self.train.batch(self.order.rows(batch))

    def content(self) -> Content:
        """Return what a resume compares of the rows."""
        return content_of(self.train, self.val)

    async def describe_tools(self, environment: Environment) -> None:
        """Ask what the agents offer, and describe their tools in the prompts. Fewer may then be short enough.

        Raises:
            UnknownAgent: the environment has no such agent.
            InvalidData: no prompt is short enough with its tools.
        """
        agents = sorted(name for name in self._named_agents() if AGENTS[name].converses)
        described = await environment.describe(DescribeRequest(agents=agents))
        tools = {agent.name: [json.loads(tool) for tool in agent.tools] for agent in described.agents}
        if any(tools.values()):
            self._tools = tools
            given = self._job, self._tokenizer, self._agents
            self.train, self.order, self.num_steps = await asyncio.to_thread(training_data, *given)
            self.val = await asyncio.to_thread(validation_data, *given)

    @property
    def _agents(self) -> Agents | None:
        rollout = self._job.rollout
        return Agents(rollout.agent.default_agent_loop, self._tools) if rollout.multi_turn.enable else None

    def _named_agents(self) -> set[str]:
        data = [each for each in (self.train, self.val) if isinstance(each, PromptDataset)]
        return {name for each in data for name in each.agents}

    def _warn_of_no_conversations(self) -> None:
        """Log a warning if the job has an environment, but no row has an agent that talks to it."""
        agents = self._named_agents()
        if agents and not any(AGENTS[name].converses for name in agents):
            log.warning(
                "rollout.multi_turn.enable is true, but the agent of every row is %s, so no row has an "
                "environment or tools; set rollout.agent.default_agent_loop, or the rows' column agent_name, "
                "to tool_agent or another agent, or set enable to false",
                ", ".join(sorted(agents)),
            )
