"""The environment role in process: the episodes of a replica."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rolemesh.agents.environment import Agent, Conversation, Episode
from rolemesh.agents.messages import chat_of, object_of
from rolemesh.agents.tools import ToolSchema
from rolemesh.batch_validation import BatchValidator
from rolemesh.catalog.agents import AGENTS
from rolemesh.config import JobConfig
from rolemesh.config.yaml_file import one_line
from rolemesh.errors import EpisodeLost, InvalidBatch, InvalidConfig, RoleBusy, UnknownAgent
from rolemesh.services.environment.episode import EpisodeTimeouts, OpenedEpisode, name_of
from rolemesh.services.environment.external.endpoint import EpisodeEndpoint
from rolemesh.services.environment.external.programs import Programs
from rolemesh.telemetry import metrics
from rolemesh.v1 import environment_pb2
from rolemesh.v1.environment_pb2 import (
    ActRequest,
    ActResponse,
    CloseEpisodeRequest,
    CloseEpisodeResponse,
    DescribeRequest,
    DescribeResponse,
    OpenEpisodeRequest,
    OpenEpisodeResponse,
)
from rolemesh.wire.limits import MAX_ANSWER_BYTES, MAX_EPISODE_NAME, MAX_TOOLS
from rolemesh.wire.streams import LARGE_BYTES
from rolemesh.workers.local import LocalWorker
from rolemesh.workers.worker_context import WorkerContext

log = logging.getLogger(__name__)

REMEMBERED_S = 60.0  # seconds in which the close of an episode may be repeated
SPARE_S = 120.0  # beyond episode_timeout_s, after which a controller that lives closes an episode
OTHER = "other"  # label in metrics for agents and tools that the job does not have


class EnvironmentWorker(LocalWorker):
    """Implements rolemesh.roles.Environment.

    Conversations run on the event loop. When the role loads, it makes the default agent, if it has
    conversations, and tool_agent, if the job names tools or interactions. It makes any other agent when a
    request first names it.

    Args:
        job: has the agents and their limits.
        worker_context: the worker's thread; None: one of its own.

    Raises:
        InvalidConfig: an agent cannot be made, e.g. a tool is unknown.
    """

    def __init__(self, job: JobConfig, worker_context: WorkerContext | None = None) -> None:
        super().__init__("environment", worker_context)
        self.validator = BatchValidator({})
        self._job = job
        settings = job.rollout.multi_turn
        self._limits = EpisodeTimeouts(settings.call_timeout_s, settings.episode_timeout_s + SPARE_S)
        self._max_episodes = settings.max_episodes
        self._agents: dict[str, Agent] = {}
        self._server = EpisodeEndpoint()
        self._making = asyncio.Lock()
        self._tools: set[str] = set()
        self._episodes: dict[str, OpenedEpisode] = {}
        self._open: set[OpenedEpisode] = set()
        named = {job.rollout.agent.default_agent_loop}
        by_file = settings.tool_config_path or settings.interaction_config_path
        if settings.tools or settings.mcp_servers or by_file:
            named.add("tool_agent")
        for name in sorted(named):
            if AGENTS[name].converses:
                self._make(name)

    # ------------------------------------------------------------------------------ requests

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        """Return the tools of agents.

        Raises:
            InvalidBatch: it names more agents than there are.
            UnknownAgent: one does not exist; the message has the known ones.
        """
        if len(request.agents) > len(AGENTS):
            raise InvalidBatch(
                f"Describe names {len(request.agents)} agents, and {len(AGENTS)} exist; name each at most once"
            )
        specs = [self._spec(name) for name in request.agents]  # all, before an agent is made
        response = DescribeResponse()
        for name, spec in zip(request.agents, specs, strict=True):
            tools = (await self._agent(name)).tools if spec.converses else ()
            response.agents.append(environment_pb2.Agent(name=name, tools=_as_json(name, tools)))
        if response.ByteSize() > MAX_ANSWER_BYTES:
            raise InvalidConfig(
                f"the tools of {', '.join(request.agents)} take more than {MAX_ANSWER_BYTES} bytes"
            )
        return response

    async def open_episode(self, request: OpenEpisodeRequest) -> OpenEpisodeResponse:
        """Begin an episode, or repeat the answer to the same attempt.

        Raises:
            EpisodeLost: a later attempt has begun.
            RoleBusy: the replica has as many episodes as it may have.
            UnknownAgent, InvalidBatch, InvalidData, EnvironmentFailed: it cannot begin.
        """
        _check_names(request)
        known = self._episodes.get(request.episode)
        if known is not None and known.attempt > request.attempt:
            raise EpisodeLost(f"{known.where}: attempt {request.attempt} came after attempt {known.attempt}")
        if known is not None and known.attempt == request.attempt:
            return await known.opened()
        if known is not None:
            known.end("replaced")
        elif len(self._open) >= self._max_episodes:
            raise RoleBusy(
                f"{len(self._open)} episodes are open, as many as a replica may have "
                "(rollout.multi_turn.max_episodes)"
            )
        opens = partial(self._conversation, request)
        episode = OpenedEpisode(request, opens, self._limits, self._answered, self._ended)
        self._episodes[request.episode] = episode
        self._open.add(episode)
        metrics.ENVIRONMENT_EPISODES.set(len(self._open))
        return await episode.opened()

    async def act(self, request: ActRequest) -> ActResponse:
        """Answer an episode's next turn, or repeat its last answer.

        Raises:
            EpisodeLost: this replica does not have it, or not this attempt; or it ended meanwhile.
            InvalidBatch, EnvironmentFailed: as OpenedEpisode.act.
        """
        return await self._find(request).act(request)

    async def close_episode(self, request: CloseEpisodeRequest) -> CloseEpisodeResponse:
        """End an episode, or repeat how it ended.

        Raises:
            EpisodeLost: this replica does not have it, or not this attempt.
            EnvironmentFailed: the conversation failed; the message names the row's uid and the agent.
        """
        return await self._find(request).closed()

    def close(self) -> None:
        super().close()
        for agent in self._agents.values():
            if hasattr(agent, "close"):
                agent.close()

    # ---------------------------------------------------------------------------------- parts

    def _find(self, request: ActRequest | CloseEpisodeRequest) -> OpenedEpisode:
        known = self._episodes.get(request.episode)
        if known is None:
            raise EpisodeLost(f"this replica does not have {name_of(request)}, attempt {request.attempt}")
        if known.attempt != request.attempt:
            raise EpisodeLost(
                f"{known.where}: attempt {request.attempt} was asked, attempt {known.attempt} is here"
            )
        return known

    async def _conversation(self, request: OpenEpisodeRequest) -> Conversation:
        if not self._spec(request.agent).converses:
            raise UnknownAgent(f"agent {request.agent} has no conversations: its rows have one turn")
        agent = await self._agent(request.agent)
        if len(request.row) < LARGE_BYTES:
            return agent.open(_episode_of(request))
        return agent.open(await asyncio.to_thread(_episode_of, request))

    async def _agent(self, name: str) -> Agent:
        async with self._making:
            if name not in self._agents:
                await self.run(self._make, name)
        return self._agents[name]

    def _make(self, name: str) -> None:
        if name in self._agents:
            return
        spec = AGENTS[name]
        with spec.errors_named():
            code = spec.load()
            agent: Agent = Programs(self._job, code, self._server) if spec.calls else code(self._job)
            tools = _as_json(name, agent.tools)
        self._tools |= {json.loads(tool)["function"]["name"] for tool in tools}
        self._agents[name] = agent

    def _spec(self, name: str) -> Any:
        if name not in AGENTS:
            raise UnknownAgent(f"agent_name is {name!r:.100}, {AGENTS.unknown(name)}")
        return AGENTS[name]

    def _answered(self, episode: OpenedEpisode, answer: ActResponse) -> None:
        metrics.ENVIRONMENT_TURNS.labels(episode.agent).inc()
        for use in answer.tools:
            tool = use.name if use.name in self._tools else OTHER
            metrics.TOOL_CALLS.labels(tool).inc()
            metrics.TOOL_SECONDS.labels(tool).observe(use.seconds)
            metrics.TOOL_ERRORS.labels(tool).inc(bool(use.error))

    def _ended(self, episode: OpenedEpisode, reason: str) -> None:
        self._open.discard(episode)
        metrics.ENVIRONMENT_EPISODES.set(len(self._open))
        metrics.ENVIRONMENT_ENDED.labels(episode.agent if episode.agent in AGENTS else OTHER, reason).inc()

        def forget() -> None:
            if self._episodes.get(episode.name) is episode:
                del self._episodes[episode.name]

        if reason == "abandoned":
            forget()
        else:
            asyncio.get_running_loop().call_later(REMEMBERED_S, forget)


def _episode_of(request: OpenEpisodeRequest) -> Episode:
    what = f"row {request.uid}"
    row = object_of(request.row, f"{what}: its columns") if request.row else {}
    return Episode(request.uid, row, chat_of(request.messages, f"{what}: its prompt"), request.seed)


def _check_names(request: OpenEpisodeRequest) -> None:
    if not request.episode or not request.attempt:
        raise InvalidBatch(
            f"OpenEpisode has episode {request.episode!r:.100} and attempt {request.attempt}; a name, and a "
            "number from 1, expected"
        )
    for key in ("episode", "agent", "uid"):
        if len(text := getattr(request, key)) > MAX_EPISODE_NAME:
            raise InvalidBatch(
                f"OpenEpisode's {key} has {len(text)} characters; at most {MAX_EPISODE_NAME} are accepted"
            )


def _as_json(agent: str, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return an agent's tools as JSON. Raises InvalidConfig if one is not a tool, or there are too many."""
    if len(tools) > MAX_TOOLS:
        raise InvalidConfig(f"agent {agent} offers {len(tools)} tools; at most {MAX_TOOLS} are possible")
    texts = []
    for tool in tools:
        try:
            texts.append(json.dumps(dict(tool), allow_nan=False))
            ToolSchema.model_validate(tool)
        except (TypeError, ValueError) as error:
            raise InvalidConfig(
                f"agent {agent} offers {tool!r:.200}, which is no tool: {one_line(str(error))}"
            ) from error
    return texts
