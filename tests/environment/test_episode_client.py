"""An episode stays with its replica. If that dies, the episode is lost, and other replicas' episodes go on."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from environments import closing, environment_job, opening, turn
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from serving import serve_process, served

from rolemesh.errors import EnvironmentFailed, EpisodeLost, RoleBusy, RoleFailed, UnknownAgent
from rolemesh.methods import methods
from rolemesh.rpc.calling import episodes
from rolemesh.rpc.calling.episodes import EnvironmentClient
from rolemesh.rpc.contract import ENVIRONMENT, rpcs
from rolemesh.services.processes.serve import group_server, load_group
from rolemesh.v1.environment_pb2 import (
    ActResponse,
    Agent,
    CloseEpisodeResponse,
    DescribeRequest,
    DescribeResponse,
    Message,
    OpenEpisodeResponse,
    ToolUse,
)


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def replica_of(client: EnvironmentClient, name: str) -> str:
    """Where an episode lives."""
    return next(home.replica.address for key, home in client._homes.items() if key.startswith(f"{name}@"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # another process's state
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("soon_gone")
async def test_a_killed_replica_loses_only_its_own_episodes(tiny_model: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of a turn. The lost episodes begin anew elsewhere, with the same answers."""
    job, log = environment_job(tmp_path, tiny_model), tmp_path / "log"
    names = [f"e{number}" for number in range(8)]
    async with AsyncExitStack() as stack:
        processes = []
        for number in range(2):
            directory = tmp_path / f"replica{number}"
            directory.mkdir()
            processes.append(await stack.enter_async_context(serve_process("environment", job, directory)))
        by_address = {each.address: each for each in processes}
        client = EnvironmentClient(list(by_address), methods(job))
        await stack.enter_async_context(client)
        await client.wait_until_ready(60)
        for name in names:
            await client.open_episode(opening(name, log=str(log)))
        at = {name: replica_of(client, name) for name in names}
        assert sorted(Counter(at.values()).values()) == [4, 4]
        for name in names:
            await client.act(turn(name, 1, "say one"))
        victim = at["e0"]
        lost = [name for name in names if at[name] == victim]
        hanging = [asyncio.create_task(client.act(turn(name, 2, "hang"))) for name in lost]
        await until(lambda: all(f"row-{name} turn 2 hang" in lines(log) for name in lost))
        by_address[victim].process.send_signal(signal.SIGKILL)
        for name in set(names) - set(lost):  # meanwhile
            answer = await client.act(turn(name, 2, "say two"))
            assert answer.messages[0].content == "7 2 two"
        ended = await asyncio.gather(*hanging, return_exceptions=True)
        for name, error in zip(lost, ended, strict=True):
            assert isinstance(error, EpisodeLost), error
            assert str(error).startswith(f"row row-{name} (agent obedient): the environment at {victim} lost")
        for name in lost:
            await client.open_episode(opening(name, log=str(log), attempt=2))
            assert replica_of(client, name) != victim
            answer = await client.act(turn(name, 1, "say one", attempt=2))
            assert answer.messages[0].content == "7 1 one"
        for name in names:
            end = await client.close_episode(closing(name, attempt=2 if name in lost else 1))
            assert end.reward == 0.25
        assert client._homes == {}
        assert [replica.outstanding_rows for replica in client.pool.replicas] == [0, 0]
        assert client.pool.pending_rows == 0


async def test_a_replica_that_was_started_anew_has_lost_its_episodes(tiny_model: Path, tmp_path: Path) -> None:
    job, log = environment_job(tmp_path, tiny_model), tmp_path / "log"
    server = group_server(["environment"])
    address = await server.start("127.0.0.1:0")
    await server.ready((await load_group(["environment"], job))[1])
    async with EnvironmentClient([address], methods(job)) as client:
        await client.wait_until_ready(120)
        await client.open_episode(opening("a", log=str(log)))
        await server.drain(0)
        server = group_server(["environment"])
        assert await server.start(address) == address
        await server.ready((await load_group(["environment"], job))[1])
        with pytest.raises(EpisodeLost, match=r"row row-a .* lost its episode"):
            await client.act(turn("a", 1, "say one"))
        await client.open_episode(opening("a", log=str(log), attempt=2))
    await server.drain(0)


async def test_an_episode_outlives_its_controller_and_can_be_reopened(tiny_model: Path, tmp_path: Path) -> None:
    """A controller that resumes opens the same episodes, with the same attempt."""
    job, log = environment_job(tmp_path, tiny_model), tmp_path / "log"
    async with served("environment", job) as addresses:
        for _ in range(2):
            async with EnvironmentClient(addresses, methods(job)) as client:
                await client.wait_until_ready(120)
                await client.open_episode(opening("a", log=str(log)))
                assert (await client.act(turn("a", 1, "say one"))).messages[0].content == "7 1 one"
    assert lines(log).count("row-a begin") == 2


async def test_an_episode_opens_where_there_is_room(tiny_model: Path, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    jobs = [environment_job(tmp_path, tiny_model, max_episodes=most) for most in (1, 100)]
    async with (
        served("environment", *jobs) as [small, large],
        EnvironmentClient([small, large], methods(jobs[0])) as client,
    ):
        await client.wait_until_ready(120)
        async with asyncio.timeout(120):
            await asyncio.gather(*(client.open_episode(opening(f"e{i}", log=log)) for i in range(9)))
        assert Counter(home.replica.address for home in client._homes.values()) == {small: 1, large: 8}


class Changing:
    """Members that the test changes."""

    def __init__(self, *addresses: str) -> None:
        self.addresses, self.changed = frozenset(addresses), asyncio.Event()

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        while True:
            yield self.addresses
            await self.changed.wait()
            self.changed.clear()

    def become(self, *addresses: str) -> None:
        self.addresses = frozenset(addresses)
        self.changed.set()


async def test_replicas_join_and_leave(tiny_model: Path, tmp_path: Path) -> None:
    """One that joins gets the next episodes. One that leaves gets none, and may finish those that it has."""
    job, log = environment_job(tmp_path, tiny_model), str(tmp_path / "log")
    async with served("environment", job, job) as [first, second]:
        members = Changing(first)
        async with EnvironmentClient(members, methods(job)) as client:
            await client.wait_until_ready(120)
            for name in ("a", "b"):
                await client.open_episode(opening(name, log=log))
            members.become(first, second)
            await until(lambda: len(client.pool.live) == 2)
            await client.open_episode(opening("c", log=log))
            assert replica_of(client, "c") == second
            members.become(second)
            await until(lambda: [replica.address for replica in client.pool.replicas] == [second])
            await client.open_episode(opening("d", log=log))
            assert replica_of(client, "d") == second
            for name in ("a", "b", "c", "d"):
                assert (await client.act(turn(name, 1, "say one"))).messages[0].content == "7 1 one"
                await client.close_episode(closing(name))
            assert not client.pool._leaving


# ---------------------------------------------------------------- an environment that is not ours


@asynccontextmanager
async def foreign(behaviour: Callable[[str, Any], Any]) -> AsyncIterator[str]:
    """Serve EnvironmentService by a function of the method and its request, without any of our code."""
    server = grpc.aio.server()
    checks = health.HealthServicer()
    await checks.set("environment", health_pb2.HealthCheckResponse.SERVING)
    add_HealthServicer_to_server(checks, server)

    def handler(name: str) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            said = behaviour(name, context)
            if asyncio.iscoroutine(said):
                said = await said
            return said if isinstance(said, bytes) else bytes(said.SerializeToString())

        return grpc.unary_unary_rpc_method_handler(answer)

    methods_ = {rpc.name: handler(rpc.name) for rpc in rpcs(ENVIRONMENT)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ENVIRONMENT.full_name, methods_),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def client_of(
    tiny_model: Path, tmp_path: Path, behaviour: Callable[[str, Any], Any], **options: Any
) -> AsyncIterator[EnvironmentClient]:
    job = environment_job(tmp_path, tiny_model)
    async with (
        foreign(behaviour) as address,
        EnvironmentClient([address], methods(job), **options) as client,
    ):
        await client.wait_until_ready(120)
        yield client


TOOL = '{"type": "function", "function": {"name": "calc"}}'
UNREADABLE = b"\x0a\x04\x12\x02\xc3\x28"  # messages[0].content is no UTF-8


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ActResponse(reward=float("nan")), "the reward is nan; a finite number"),
        (ActResponse(tools=[ToolUse(name="t", seconds=float("inf"))]), "seconds of the tool 't' is inf"),
        (ActResponse(messages=[Message(role="robot")]), "message 0, has the role 'robot'"),
        (
            ActResponse(messages=[Message(role="user", content="x" * (2 << 20))]),
            "at most 1048576 bytes; got 2097",
        ),
        (ActResponse(messages=[Message(role="user", content="x" * (100 << 20))]), "larger than max"),
        (ActResponse(messages=[Message(role="user")] * 1025), "has 1025 messages; at most 1024"),
        (UNREADABLE, "not a rolemesh.v1.ActResponse"),
        (b"\xff\xff", "a message ends within a number"),
    ],
    ids=["nan", "inf", "role", "2 MB", "100 MB", "messages", "UTF-8", "bytes"],
)
async def test_an_invalid_answer_is_the_environments_fault(
    tiny_model: Path, tmp_path: Path, answer: Any, words: str
) -> None:
    def behaviour(name: str, context: Any) -> Any:
        return OpenEpisodeResponse() if name == "OpenEpisode" else answer

    async with client_of(tiny_model, tmp_path, behaviour) as client:
        await client.open_episode(opening("a"))
        with pytest.raises(RoleFailed, match="environment") as error:
            await client.act(turn("a", 1, "hello"))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, EnvironmentFailed),
        (grpc.StatusCode.NOT_FOUND, EpisodeLost),
        (grpc.StatusCode.INTERNAL, RoleFailed),
    ],
)
async def test_a_plain_status_means_what_the_proto_says(
    tiny_model: Path, tmp_path: Path, code: grpc.StatusCode, expected: type[Exception]
) -> None:
    async def behaviour(name: str, context: Any) -> Any:
        if name == "OpenEpisode":
            return OpenEpisodeResponse()
        if name == "CloseEpisode":
            return CloseEpisodeResponse()
        await context.abort(code, "the reason")

    async with client_of(tiny_model, tmp_path, behaviour) as client:
        await client.open_episode(opening("a"))
        with pytest.raises(expected, match="the reason") as error:
            await client.act(turn("a", 1, "hello"))
        assert type(error.value) is expected


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (["calc"], "agent 'x': tool 0 is not JSON: "),
        ([TOOL, "[]"], "agent 'x': tool 1 should be a JSON object; got []"),
        (['{"type": "function"}'], "agent 'x': tool 0, '{\"type\": \"function\"}', is no tool: "),
        ([TOOL] * 1025, "agent 'x' has 1025 tools; at most 1024 expected"),
    ],
)
async def test_what_an_agent_offers_are_tools(
    tiny_model: Path, tmp_path: Path, tools: list[str], words: str
) -> None:
    def behaviour(name: str, context: Any) -> Any:
        return DescribeResponse(agents=[Agent(name="x", tools=offered)])

    async with client_of(tiny_model, tmp_path, behaviour) as client:
        nulls = {"name": "calc", "description": None, "strict": None}  # as SDKs write fields that are not set
        offered = [TOOL, json.dumps({"type": "function", "function": nulls})]
        described = await client.describe(DescribeRequest(agents=["x"]))
        assert described.agents[0].tools == offered
        offered = tools
        with pytest.raises(RoleFailed) as error:
            await client.describe(DescribeRequest(agents=["x"]))
        assert f"environment.Describe at {client.pool.addresses}: {words}" in str(error.value)


async def test_describe_maps_not_found_to_unknown_agent(tiny_model: Path, tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED of any call is RoleBusy."""

    async def behaviour(name: str, context: Any) -> Any:
        code = grpc.StatusCode.NOT_FOUND if name == "Describe" else grpc.StatusCode.RESOURCE_EXHAUSTED
        await context.abort(code, "the reason")

    async with client_of(tiny_model, tmp_path, behaviour) as client:
        with pytest.raises(UnknownAgent, match="the reason"):
            await client.describe(DescribeRequest(agents=["x"]))
    async with client_of(tiny_model, tmp_path, behaviour, timeout_s=0.2) as client:
        with pytest.raises(RoleBusy, match="the reason"):
            await client.open_episode(opening("a"))


async def test_an_answer_after_the_deadline_loses_the_episode(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica hangs, or is as good as hung. What it says later reaches nobody."""
    late = asyncio.Event()

    async def behaviour(name: str, context: Any) -> Any:
        if name == "OpenEpisode":
            return OpenEpisodeResponse()
        await late.wait()
        return ActResponse(reward=1.0)

    monkeypatch.setattr(episodes, "ANSWERS_LATE_S", 0.2)
    async with client_of(tiny_model, tmp_path, behaviour, call_timeout_s=0.1) as client:
        await client.open_episode(opening("a"))
        with pytest.raises(EpisodeLost, match=r"row row-a .*no answer within 0.3 s"):
            await client.act(turn("a", 1, "hello"))
        late.set()
        with pytest.raises(EpisodeLost, match="not open"):
            await client.act(turn("a", 1, "hello"))


async def test_a_call_that_breaks_is_sent_again_to_a_live_replica(tiny_model: Path, tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    async def behaviour(name: str, context: Any) -> Any:
        asked[name] += 1
        if name == "OpenEpisode":
            return OpenEpisodeResponse()
        if asked[name] < 4:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
        return ActResponse(reward=0.5)

    async with client_of(tiny_model, tmp_path, behaviour) as client:
        await client.open_episode(opening("a"))
        assert (await client.act(turn("a", 1, "hello"))).reward == 0.5
    assert asked == {"OpenEpisode": 1, "Act": 4}


async def test_a_thousand_turns_wait_at_the_same_time(tiny_model: Path, tmp_path: Path) -> None:
    """More than gRPC's usual number of calls on one connection; none waits for another one's tool."""
    job, log, number = environment_job(tmp_path, tiny_model), tmp_path / "log", 1000
    async with (
        served("environment", job) as addresses,
        EnvironmentClient(addresses, methods(job)) as client,
    ):
        await client.wait_until_ready(120)
        await asyncio.gather(*(client.open_episode(opening(f"e{i}", log=str(log))) for i in range(number)))
        waiting = [asyncio.create_task(client.act(turn(f"e{i}", 1, "hang"))) for i in range(number - 1)]
        await until(lambda: len(lines(log)) == 2 * number - 1)
        answer = await client.act(turn(f"e{number - 1}", 1, "say one"))
        assert answer.messages[0].content == "7 1 one"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
