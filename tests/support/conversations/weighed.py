"""Jobs whose policy weighs texts with a tool, and their rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from in_process import small_job
from serving import served
from transformers import AutoTokenizer

from rolemesh.catalog.call_formats import CALL_FORMATS
from rolemesh.catalog.plugin_imports import forget
from rolemesh.config import JobConfig
from rolemesh.data.dataset import Agents, PromptDataset
from rolemesh.dataproto import DataProto
from rolemesh.methods import methods
from rolemesh.models.loading import load_tokenizer
from rolemesh.models.tiny import CHAT_TEMPLATE
from rolemesh.roles import Environment, Rollout
from rolemesh.rpc.calling.episodes import EnvironmentClient
from rolemesh.services.controller.conversations.conversation_rollout import ConversationRollout
from rolemesh.services.controller.stages.experience import collect, fan_out
from rolemesh.v1.environment_pb2 import DescribeRequest

FOLDER = Path(__file__).with_name("external")
PLUGIN = FOLDER / "weighing.py"
TOKENS, PROMPT_TOKENS = 96, 512
TELLS_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHAT_TEMPLATE
KEYS = (
    "rollout.multi_turn.enable=true",
    f"plugins=[{PLUGIN}]",
    "rollout.multi_turn.format=weighing",
    "rollout.multi_turn.max_assistant_turns=3",
    "rollout.multi_turn.call_timeout_s=300",  # some programs import a client of OpenAI's
    f"data.max_response_length={TOKENS}",
    f"data.max_prompt_length={PROMPT_TOKENS}",
)


def forget_plugin() -> None:
    forget(str(PLUGIN))
    CALL_FORMATS.remove(str(PLUGIN.resolve()))


def weighing_model(talkative_model: Path, directory: Path) -> Path:
    """A model that ends its turns, and whose template shows tools."""
    shutil.copytree(talkative_model, directory, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TELLS_TOOLS
    tokenizer.save_pretrained(directory)
    return directory


def weighing_job(directory: Path, model: Path, agent: str, *overrides: str) -> JobConfig:
    tools = ("rollout.multi_turn.tools=[weigh]",) if agent == "tool_agent" else ()
    named = f"rollout.agent.default_agent_loop={agent}"
    return small_job(directory, model, agent, *KEYS, named, *tools, *overrides)


def running(interpreter: str, program: Path, *arguments: str) -> str:
    """The override that names the job's program; it gets the tools of tests/support/conversations/external."""
    command = [interpreter, str(program), str(FOLDER / "tools.json"), *arguments]
    return f"rollout.agent.external={json.dumps({'command': command})}"


@asynccontextmanager
async def environment(job: JobConfig) -> AsyncIterator[EnvironmentClient]:
    """The job's environment behind a real channel."""
    async with (
        served("environment", job) as addresses,
        EnvironmentClient(addresses, methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        yield client


async def talked(
    job: JobConfig, rollout: Rollout, environment: Environment, n: int = 2, prompts: range = range(6)
) -> DataProto:
    """Rows of these prompts of a step, once all conversations have ended, in order."""
    agent, tokenizer = job.rollout.agent.default_agent_loop, load_tokenizer(job.actor.model)
    described = await environment.describe(DescribeRequest(agents=[agent]))
    tools = {each.name: [json.loads(tool) for tool in each.tools] for each in described.agents}
    data = PromptDataset(job.data.train_files, job.data, tokenizer, agents=Agents(agent, tools))
    rows = fan_out(data.batch(prompts), n, job.rollout.seed, 1, first=prompts.start)

    async def same(finished: DataProto) -> DataProto:
        return finished

    talking = ConversationRollout(rollout, environment, job, tokenizer)
    return await collect(talking.generate(rows), rows, same)
