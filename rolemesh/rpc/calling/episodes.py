"""The client of the environment role. All calls of an episode go to the replica that opened it.

Calls of other roles are independent of each other, so any replica may answer them. A call of an episode is
repeated at the same replica if a connection breaks. If the replica is gone or no longer has the episode,
EpisodeLost is raised, and the caller begins the episode again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message

from rolemesh.agents.messages import check_answer, check_end, check_opening, check_tools, invalid_as
from rolemesh.errors import (
    EnvironmentFailed,
    EpisodeLost,
    RoleBusy,
    RoleFailed,
    RolemeshError,
    RoleTimeout,
    RoleUnavailable,
    UnknownAgent,
)
from rolemesh.methods import Method
from rolemesh.rpc.calling.clients import RoleClient
from rolemesh.rpc.calling.discovery import Members
from rolemesh.rpc.calling.dispatch import ATTEMPTS_PER_REPLICA, BUSY_S, MAX_BUSY_S
from rolemesh.rpc.calling.replica import Replica
from rolemesh.tasks import cancel_all
from rolemesh.telemetry import metrics
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

ANSWERS_LATE_S = 15.0  # a replica that has not answered this long after its own limit hangs
GONE_AFTER_S = 5.0  # a replica whose connection broke is gone if it is not healthy within this time

# The error for each status, for environments in other languages, which send no error class.
PLAIN = {
    grpc.StatusCode.FAILED_PRECONDITION: EnvironmentFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RoleBusy,
    grpc.StatusCode.NOT_FOUND: EpisodeLost,
}
TOO_LARGE = "larger than max"  # gRPC's own RESOURCE_EXHAUSTED, of a message above limits.MAX_MESSAGE_BYTES


@dataclass(frozen=True)
class _Home:
    """The replica of an episode, and the episode's name in messages. Close `held` when the episode ends."""

    replica: Replica
    where: str
    held: ExitStack


class EnvironmentClient(RoleClient):
    """Implements rolemesh.roles.Environment.

    Names of episodes differ between clients, so a restarted controller finds no episode of its predecessor.
    """

    role = "environment"

    def __init__(
        self,
        addresses: Sequence[str] | Members,
        methods: Mapping[str, Method],
        *,
        call_timeout_s: float = 60.0,
        **like_every_client: Any,
    ) -> None:
        """Make the client.

        Args:
            addresses, methods, like_every_client: as RoleClient. timeout_s bounds the wait for a replica with
                room for another episode. It begins again with each answer to an episode.
            call_timeout_s: time limit in seconds of a replica for a turn.
        """
        super().__init__(addresses, methods, **like_every_client)
        self._call_timeout_s = call_timeout_s + ANSWERS_LATE_S
        self._life = uuid.uuid4().hex[:12]
        self._homes: dict[str, _Home] = {}
        self._checks: dict[Replica, asyncio.Task[str]] = {}
        self._answered_at = 0.0  # the loop's time at which an episode last got an answer

    async def describe(self, request: DescribeRequest) -> DescribeResponse:
        """Return what agents offer.

        Raises:
            UnknownAgent: the message has the known ones.
            RoleFailed: the answer is about other agents, or something that an agent offers is no tool.
        """
        try:
            answer: DescribeResponse = await self._dispatcher.call("Describe", request)
        except RoleFailed as error:
            raise _meant(error, {**PLAIN, grpc.StatusCode.NOT_FOUND: UnknownAgent}) from error
        if [agent.name for agent in answer.agents] != list(request.agents):
            named = [agent.name for agent in answer.agents]
            raise RoleFailed(f"environment.Describe: {list(request.agents)} were asked for, {named} came")
        with invalid_as(RoleFailed, f"environment.Describe at {self.pool.addresses}"):
            for agent in answer.agents:
                check_tools(agent.tools, f"agent {agent.name!r:.100}")
        return answer

    async def open_episode(self, request: OpenEpisodeRequest) -> OpenEpisodeResponse:
        """Begin an episode, at the live replica with room that has the fewest outstanding rows.

        Raises:
            RoleBusy: no replica had room, and no episode got an answer, for timeout_s.
            RoleUnavailable: no replica could be reached.
            UnknownAgent, InvalidBatch, InvalidData, EnvironmentFailed: raised by the environment.
        """
        asked = OpenEpisodeRequest()
        asked.CopyFrom(request)
        asked.episode = self._name(request)
        self._leave(asked.episode)
        where = f"row {request.uid} (agent {request.agent})"
        now = asyncio.get_running_loop().time
        wait_s = 0.0
        num_failures = 0
        since = now()
        full: set[Replica] = set()
        with ExitStack() as pending:
            pending.enter_context(self.pool.counted(1))
            while True:
                await self.pool.wait_for_live()
                free = [replica for replica in self.pool.live if replica not in full]
                if not free:
                    await asyncio.sleep(wait_s := min(2 * wait_s or BUSY_S, MAX_BUSY_S))
                    full.clear()
                    continue
                replica = min(free, key=lambda each: each.outstanding_rows)
                with ExitStack() as held:
                    held.enter_context(self.pool.holding(replica, rows=1))
                    try:
                        answer: OpenEpisodeResponse = await self._tell("OpenEpisode", replica, asked)
                        with _blamed(where, replica):
                            check_opening(answer, "what it says first")
                    except RoleBusy as error:
                        full.add(replica)
                        if now() >= max(since, self._answered_at) + self._timeout_s:
                            raise RoleBusy(f"{where}: no replica had room: {error}") from error
                    except RoleUnavailable as error:
                        num_failures += 1
                        self.pool.suspect(replica, str(error))
                        if num_failures >= ATTEMPTS_PER_REPLICA * max(1, len(self.pool.replicas)):
                            raise
                    else:
                        held.push(pending.pop_all())
                        self._homes[asked.episode] = _Home(replica, where, held.pop_all())
                        return answer
                metrics.CLIENT_RETRIES.labels(self.role, "OpenEpisode").inc()

    async def act(self, request: ActRequest) -> ActResponse:
        """Send an episode its next turn.

        Raises:
            EpisodeLost: its replica is gone, hangs, or no longer has it. The episode can begin anew.
            EnvironmentFailed, InvalidBatch: raised by the environment.
            RoleFailed: its answer is invalid.
        """
        name = self._name(request)
        asked = ActRequest()
        asked.CopyFrom(request)
        asked.episode = name
        home = self._home(name, request.episode)
        answer: ActResponse = await self._ask("Act", name, home, asked)
        with _blamed(home.where, home.replica):
            check_answer(answer, f"the answer to turn {request.turn}")
        return answer

    async def close_episode(self, request: CloseEpisodeRequest) -> CloseEpisodeResponse:
        """End an episode, also in the middle, and return its reward. Raises as `act`."""
        name = self._name(request)
        home = self._home(name, request.episode)
        try:
            asked = CloseEpisodeRequest(episode=name, attempt=request.attempt)
            answer: CloseEpisodeResponse = await self._ask("CloseEpisode", name, home, asked)
            with _blamed(home.where, home.replica):
                check_end(answer, "the end of its episode")
            return answer
        finally:
            self._leave(name)

    async def close(self) -> None:
        """Close the channels; running calls end with RoleFailed."""
        for name in list(self._homes):
            self._leave(name)
        await cancel_all(list(self._checks.values()))
        await super().close()

    # ---------------------------------------------------------------------------------- parts

    def _name(self, request: Any) -> str:
        return f"{request.episode}@{self._life}" if request.episode else ""

    def _home(self, name: str, episode: str) -> _Home:
        if name not in self._homes:
            raise EpisodeLost(f"episode {episode!r:.200} is not open; open it first, with the next attempt")
        return self._homes[name]

    def _leave(self, name: str) -> None:
        if (home := self._homes.pop(name, None)) is not None:
            home.held.close()

    async def _ask(self, rpc: str, name: str, home: _Home, asked: Message) -> Any:
        """Call an episode's replica, and retry while it lives. A repeated call has no second effect.

        Raises:
            EpisodeLost: the replica is gone, hangs, or no longer has the episode.
        """
        deadline = time.monotonic() + self._call_timeout_s
        wait_s = 0.0
        while True:
            try:
                answer = await self._tell(rpc, home.replica, asked)
                self._answered_at = asyncio.get_running_loop().time()
                return answer
            except EpisodeLost as error:
                raise self._lost(name, home, str(error)) from error
            except RoleTimeout as error:
                self.pool.suspect(home.replica, str(error))
                raise self._lost(name, home, str(error)) from error
            except RoleUnavailable as error:
                problem = await self._problem_of(home.replica)
                if problem or time.monotonic() >= deadline:
                    raise self._lost(name, home, f"{error} ({problem or 'it broke off repeatedly'})") from error
            metrics.CLIENT_RETRIES.labels(self.role, rpc).inc()
            await asyncio.sleep(wait_s := min(2 * wait_s or BUSY_S, MAX_BUSY_S))

    async def _tell(self, rpc: str, replica: Replica, asked: Message) -> Any:
        try:
            return await self._dispatcher.tell(rpc, replica, asked, self._call_timeout_s)
        except RoleFailed as error:
            raise _meant(error, PLAIN) from error

    def _lost(self, name: str, home: _Home, why: str) -> EpisodeLost:
        self._leave(name)
        return EpisodeLost(f"{home.where}: the environment at {home.replica.address} lost its episode: {why}")

    async def _problem_of(self, replica: Replica) -> str:
        """Return why a replica is gone; "" if it lives. All episodes of a replica share one check."""
        if (check := self._checks.get(replica)) is None:
            check = self._checks[replica] = asyncio.create_task(self._check(replica))
            check.add_done_callback(lambda _: self._checks.pop(replica))
        return await asyncio.shield(check)

    async def _check(self, replica: Replica) -> str:
        deadline = time.monotonic() + GONE_AFTER_S
        wait_s = BUSY_S
        while problem := await replica.health():
            if time.monotonic() + wait_s >= deadline:
                self.pool.suspect(replica, problem)
                return problem
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.5)
        return ""


def _blamed(where: str, replica: Replica) -> AbstractContextManager[None]:
    """Turn InvalidBatch into RoleFailed of the replica within the block, which checks an answer."""
    return invalid_as(RoleFailed, f"{where}: environment at {replica.address}")


def _meant(error: RoleFailed, plain: Mapping[grpc.StatusCode, type[RolemeshError]]) -> RolemeshError:
    """Return the error that the status means, if the answer does not name the class of its error."""
    if isinstance(error.status, grpc.StatusCode) and TOO_LARGE not in str(error) and error.status in plain:
        return plain[error.status](str(error))
    return error
