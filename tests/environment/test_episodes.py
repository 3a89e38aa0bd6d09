"""Each turn is answered once however often it is sent, and nothing that an environment says or does harms
others. Over a real channel, with the real servicer and client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from environments import closing, environment_job, opening, turn
from serving import served
from skipping import skip

from rolemesh.config.job import JobConfig
from rolemesh.errors import (
    EnvironmentFailed,
    EpisodeLost,
    InvalidBatch,
    InvalidData,
    RoleBusy,
    UnknownAgent,
)
from rolemesh.methods import methods
from rolemesh.rpc.calling.episodes import EnvironmentClient
from rolemesh.rpc.contract import ENVIRONMENT
from rolemesh.services.environment import worker as worker_module
from rolemesh.telemetry import metrics
from rolemesh.v1.environment_pb2 import ActRequest, DescribeRequest, Message
from rolemesh.v1.environment_pb2_grpc import EnvironmentServiceStub


@asynccontextmanager
async def environment(job: JobConfig, **options: Any) -> AsyncIterator[EnvironmentClient]:
    async with (
        served("environment", job) as addresses,
        EnvironmentClient(addresses, methods(job), **options) as client,
    ):
        await client.wait_until_ready(120)
        yield client


@asynccontextmanager
async def stub_of(job: JobConfig) -> AsyncIterator[Any]:
    """The service without our client."""
    async with served("environment", job) as [address], grpc.aio.insecure_channel(address) as channel:
        yield EnvironmentServiceStub(channel)  # type: ignore[no-untyped-call]


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  # another thread's or task's state
            await asyncio.sleep(0.005)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


# ---------------------------------------------------------------------------------- one effect


async def test_an_episode_is_opened_answered_and_closed(tiny_model: Path, tmp_path: Path, log: Path) -> None:
    async with environment(environment_job(tmp_path, tiny_model)) as client:
        first = await client.open_episode(opening("a", log=str(log), begin="say hello"))
        assert [(m.role, m.content) for m in first.messages] == [("user", "7 0 hello")]
        answer = await client.act(turn("a", 1, "say one"))
        assert [(m.role, m.content) for m in answer.messages] == [("user", "7 1 one")]
        assert (await client.act(turn("a", 2, "reward 0.5"))).reward == 0.5
        last = await client.act(turn("a", 3, "done answered"))
        assert (last.done, last.why) == (True, "answered")
        end = await client.close_episode(closing("a"))
        assert (end.reward, dict(end.metrics)) == (0.25, {"turns": 3.0})
    assert lines(log) == [
        "row-a begin",
        "row-a turn 1 say one",
        "row-a turn 2 reward 0.5",
        "row-a turn 3 done answered",
        "row-a close",
    ]


async def test_a_repeated_call_gets_its_answer_without_a_second_effect(
    tiny_model: Path, tmp_path: Path, log: Path
) -> None:
    async with stub_of(environment_job(tmp_path, tiny_model)) as stub:
        openings = [await stub.OpenEpisode(opening("a", log=str(log), begin="say hello")) for _ in range(3)]
        answers = [await stub.Act(turn("a", 1, "say one")) for _ in range(3)]
        again = await stub.OpenEpisode(opening("a", log=str(log), begin="say hello"))
        ends = [await stub.CloseEpisode(closing("a")) for _ in range(3)]
        after = await stub.Act(turn("a", 1, "say one"))
    assert all(each == openings[0] for each in (*openings, again))
    assert all(each == answers[0] for each in (*answers, after))
    assert all(each == ends[0] for each in ends)
    assert lines(log) == ["row-a begin", "row-a turn 1 say one", "row-a close"]


async def test_equal_calls_at_the_same_time_join(tiny_model: Path, tmp_path: Path, log: Path) -> None:
    """Also if the first one's caller has gone away meanwhile."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    os.mkfifo(f"{gate}.open")
    begun, opens = os.open(gate, os.O_RDWR), os.open(f"{gate}.open", os.O_RDWR)
    async with stub_of(environment_job(tmp_path, tiny_model)) as stub:
        await asyncio.gather(*(stub.OpenEpisode(opening("a", log=str(log))) for _ in range(5)))
        first = stub.Act(turn("a", 1, f"gate {gate}"))
        await asyncio.to_thread(os.read, begun, 1)
        first.cancel()
        others = [asyncio.ensure_future(stub.Act(turn("a", 1, f"gate {gate}"))) for _ in range(5)]
        early = await refused(stub.Act(turn("a", 2, "say two")))
        os.write(opens, b".")
        answers = await asyncio.gather(*others)
    assert early == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "row row-a (agent obedient): turn 2 came before the previous call was answered",
    )
    assert [answer.messages[0].content for answer in answers] == ["passed"] * 5
    assert lines(log) == ["row-a begin", f"row-a turn 1 gate {gate}"]


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


async def test_any_other_turn_than_the_last_and_the_next_is_refused(
    tiny_model: Path, tmp_path: Path, log: Path
) -> None:
    async with environment(environment_job(tmp_path, tiny_model)) as client:
        await client.open_episode(opening("a", log=str(log)))
        for number in (0, 2, 4_000_000_000):
            with pytest.raises(InvalidBatch, match=rf"row row-a .*turn {number} came; 1 expected"):
                await client.act(turn("a", number, "say x"))
        await client.act(turn("a", 1, "say one"))
        await client.act(turn("a", 2, "say two"))
        for number in (0, 1, 4):
            with pytest.raises(InvalidBatch, match=rf"turn {number} came; 3, or 2 again expected"):
                await client.act(turn("a", number, "say x"))
        with pytest.raises(InvalidBatch, match="turn 2 came again with another message"):
            await client.act(turn("a", 2, "say x"))
        await client.act(turn("a", 3, "done now"))
        with pytest.raises(InvalidBatch, match="turn 4 came, but turn 3 was the last"):
            await client.act(turn("a", 4, "say x"))
    assert len(lines(log)) == 4


async def test_a_later_attempt_ends_the_one_before(tiny_model: Path, tmp_path: Path, log: Path) -> None:
    async with stub_of(environment_job(tmp_path, tiny_model)) as stub:
        await stub.OpenEpisode(opening("a", log=str(log)))
        await stub.Act(turn("a", 1, "say one"))
        hanging = asyncio.ensure_future(refused(stub.Act(turn("a", 2, "hang"))))
        await until(lambda: "row-a turn 2 hang" in lines(log))
        await stub.OpenEpisode(opening("a", log=str(log), attempt=2))
        assert (await hanging)[0] is grpc.StatusCode.NOT_FOUND
        lost = [
            await refused(stub.Act(turn("a", 3, "say x"))),
            await refused(stub.OpenEpisode(opening("a", log=str(log)))),
            await refused(stub.CloseEpisode(closing("a"))),
        ]
        answer = await stub.Act(turn("a", 1, "say one", attempt=2))
        await until(lambda: lines(log).count("row-a close") == 1)
    assert {code for code, _ in lost} == {grpc.StatusCode.NOT_FOUND}
    assert lost[0][1] == "row row-a (agent obedient): attempt 1 was asked, attempt 2 is here"
    assert answer.messages[0].content == "7 1 one"  # as in the first attempt


# ------------------------------------------------------------------------------------- the end


async def test_an_episode_that_nobody_asks_about_is_closed_and_lost(
    tiny_model: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "SPARE_S", 0.0)
    abandoned = metrics.ENVIRONMENT_ENDED.labels("obedient", "abandoned")._value
    before = abandoned.get()
    async with environment(environment_job(tmp_path, tiny_model, episode_timeout_s=0.3)) as client:
        await client.open_episode(opening("a", log=str(log)))
        await until(lambda: "row-a close" in lines(log))
        await until(lambda: metrics.ENVIRONMENT_EPISODES._value.get() == 0)  # after the agent has closed
        with pytest.raises(EpisodeLost, match=r"row row-a .*lost its episode: .*does not have episode"):
            await client.act(turn("a", 1, "say x"))
        with pytest.raises(EpisodeLost, match="episode 'a' is not open; open it first"):
            await client.act(turn("a", 1, "say x"))
        assert abandoned.get() == before + 1
        await client.open_episode(opening("a", log=str(log), attempt=2))


async def test_an_end_is_remembered_for_a_while(
    tiny_model: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stub_of(environment_job(tmp_path, tiny_model)) as stub:
        await stub.OpenEpisode(opening("a", log=str(log)))
        end = await stub.CloseEpisode(closing("a"))
        assert await stub.CloseEpisode(closing("a")) == end
        assert (await refused(stub.Act(turn("a", 1, "say x"))))[0] is grpc.StatusCode.NOT_FOUND
        monkeypatch.setattr(worker_module, "REMEMBERED_S", 0.05)
        await stub.OpenEpisode(opening("b", log=str(log)))
        await stub.CloseEpisode(closing("b"))

        async def is_forgotten() -> bool:
            try:
                await stub.CloseEpisode(closing("b"))
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.NOT_FOUND
            return False

        async with asyncio.timeout(120):
            while not await is_forgotten():  # noqa: ASYNC110  # another process's clock
                await asyncio.sleep(0.01)
    assert lines(log) == ["row-a begin", "row-a close", "row-b begin", "row-b close"]


async def test_a_replica_has_so_many_episodes_and_then_is_busy(
    tiny_model: Path, tmp_path: Path, log: Path
) -> None:
    async with environment(environment_job(tmp_path, tiny_model, max_episodes=2), timeout_s=0.2) as client:
        for name in ("a", "b"):
            await client.open_episode(opening(name, log=str(log)))
        with pytest.raises(
            RoleBusy, match=r"no replica had room: .*2 episodes are open, as many as a replica may"
        ):
            await client.open_episode(opening("c", log=str(log)))
        await client.close_episode(closing("a"))
        await client.open_episode(opening("c", log=str(log)))


async def test_an_episode_that_waits_for_room_gets_it_in_the_end(
    tiny_model: Path, tmp_path: Path, log: Path
) -> None:
    """However long the other episodes are answered."""
    job = environment_job(tmp_path, tiny_model, max_episodes=1, episode_timeout_s=1e6)
    busy = metrics.CLIENT_REQUESTS.labels("environment", "OpenEpisode", "RESOURCE_EXHAUSTED")._value
    async with environment(job, timeout_s=600.0) as client:

        async def refused() -> None:
            before = busy.get()
            await until(lambda: busy.get() > before)

        await client.open_episode(opening("a", log=str(log)))
        waiting = asyncio.create_task(client.open_episode(opening("b", log=str(log))))
        for number in (1, 2):
            await refused()
            skip(400)
            await client.act(turn("a", number, "hello"))
        await refused()
        await client.close_episode(closing("a"))
        async with asyncio.timeout(120):
            await waiting


# --------------------------------------------------------------------- what an environment says


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("reward nan", r"the reward is nan; a finite number of float32's range expected"),
        ("reward inf", r"the reward is inf;"),
        ("reward 1e39", r"the reward is 1e\+39;"),
        ("text-reward", r"the reward is '1';"),
        ("role robot", r"message 0, has the role 'robot', which is none of system, user, assistant, tool"),
        ("bytes", r"content should be a text; got b'1' \(bytes\)"),
        ("surrogate", r"content is no UTF-8 text: surrogates not allowed at character 0"),
        ("flood 1000000", r"has 10000\d\d bytes; at most 983040 are sent. Cut long texts"),
        ("flood 100000000", r"has 100000000 characters; at most 1048576 bytes"),
        ("messages 2000", r"has 2000 messages; at most 1024 are sent"),
        ("raise something", r"turn 1 raised LookupError: something"),
        ("exit 3", r"turn 1 raised RuntimeError: it called sys.exit\('3'\)"),
        ("none", r"should be a list of messages; got None"),
        ("nonsense", r"should be a list of messages; got 17"),
        ("odd negative", r"turn 1: max_tokens is -1; a number of tokens, or 0, expected"),
        ("odd fraction", r"turn 1: max_tokens is 0.5;"),
        ("odd array", r"turn 1: max_tokens is array\(\[5\]\);"),
        ("odd array of tools", r"turn 1: tools should be a list, each a ToolUse; got array\(5\)"),
        ("odd no tools", r"turn 1: tools should be a list, each a ToolUse; got None"),
        ("odd names", r"turn 1: tools should be a list, each a ToolUse; got \['x'\]"),
        ("odd prompt", r"its prompt: tools should be a list, each a Mapping; got None"),
        ("odd set", r"its prompt has a tool that is not JSON: "),
        ("hang", r"turn 1: it took longer than 0.5 s \(rollout.multi_turn.call_timeout_s\)"),
        ("resist", r"turn 1: it took longer than 0.5 s"),
    ],
)
async def test_an_error_of_an_environment_names_the_row_and_the_agent(
    tiny_model: Path, tmp_path: Path, log: Path, order: str, words: str
) -> None:
    """Every further call gets it again. It frees the episode, and leaves other episodes alone."""
    async with environment(environment_job(tmp_path, tiny_model, call_timeout_s=0.5)) as client:
        for name in ("a", "b"):
            await client.open_episode(opening(name, log=str(log)))
        for request in (turn("a", 1, order), turn("a", 1, order), turn("a", 2, "say x"), closing("a")):
            call = client.act(request) if isinstance(request, ActRequest) else client.close_episode(request)
            with pytest.raises(EnvironmentFailed, match=rf"row row-a \(agent obedient\): .*{words}"):
                await call
        await until(lambda: "row-a close" in lines(log))
        assert (await client.act(turn("b", 1, "say one"))).messages[0].content == "7 1 one"
        assert metrics.ENVIRONMENT_EPISODES._value.get() == 1
    assert lines(log).count(f"row-a turn 1 {order}") == 1


async def test_errors_of_begin_and_close_name_the_row_too(tiny_model: Path, tmp_path: Path, log: Path) -> None:
    async with environment(environment_job(tmp_path, tiny_model, call_timeout_s=0.5)) as client:
        with pytest.raises(
            EnvironmentFailed, match=r"row row-a \(agent obedient\): begin raised LookupError: x"
        ):
            await client.open_episode(opening("a", log=str(log), begin="raise x"))
        with pytest.raises(EnvironmentFailed, match=r"row row-b .*message 0, has the role 'robot'"):
            await client.open_episode(opening("b", log=str(log), begin="role robot"))
        with pytest.raises(InvalidData, match=r"row row-c \(agent obedient\): extra_info.log is missing"):
            await client.open_episode(opening("c"))
        await client.open_episode(opening("d", log=str(log), outcome=float("inf")))
        with pytest.raises(EnvironmentFailed, match=r"row row-d .*what close returned: the reward is inf"):
            await client.close_episode(closing("d"))
        await client.open_episode(opening("f", log=str(log), metrics=[1]))
        with pytest.raises(EnvironmentFailed, match=r"row row-f .*metrics should be a dict of numbers; got"):
            await client.close_episode(closing("f"))
        await client.open_episode(opening("e", log=str(log), close="raise y"))
        with pytest.raises(EnvironmentFailed, match=r"row row-e .*close raised LookupError: y"):
            await client.close_episode(closing("e"))
        await until(lambda: metrics.ENVIRONMENT_EPISODES._value.get() == 0)


async def test_a_tool_that_no_agent_offers_is_no_label_of_a_metric(
    tiny_model: Path, tmp_path: Path, log: Path
) -> None:
    async with environment(environment_job(tmp_path, tiny_model)) as client:
        await client.open_episode(opening("a", log=str(log)))
        answer = await client.act(turn("a", 1, "tool made up by the policy"))
        assert answer.tools[0].name == "made up by the policy"
    labels = {sample.labels["tool"] for metric in metrics.TOOL_CALLS.collect() for sample in metric.samples}
    assert "other" in labels
    assert "made up by the policy" not in labels


# ---------------------------------------------------------------------------- what a caller says


async def test_a_request_that_is_malformed_is_refused(tiny_model: Path, tmp_path: Path, log: Path) -> None:
    def changed(**fields: Any) -> Any:
        request = opening("x", log=str(log))
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    async with stub_of(environment_job(tmp_path, tiny_model)) as stub:
        robot = opening("r", log=str(log))
        robot.messages.add(role="robot")
        crowd = opening("m", log=str(log))
        crowd.messages.extend([Message(role="user")] * 2000)
        invalid = {
            "a name, and a number from 1, expected": changed(episode=""),
            "attempt 0; a name": changed(attempt=0),
            "episode has 1000 characters; at most 512": changed(episode="e" * 1000),
            "uid has 1000 characters": changed(uid="e" * 1000),
            "its columns is not JSON": changed(episode="j", row="{"),
            "its columns should be a JSON object; got [1]": changed(episode="k", row="[1]"),
            "its columns is not JSON: maximum recursion": changed(episode="l", row="[" * 100_000),
            "message 1, has the role 'robot'": robot,
            "its prompt has 2001 messages; at most 1024": crowd,
            "at most 1048576 bytes": changed(row="x" * (2 << 20)),
        }
        for words, request in invalid.items():
            code, said = await refused(stub.OpenEpisode(request))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (words, said)
            assert words in said
        code, said = await refused(stub.OpenEpisode(changed(episode="u", agent="obedeint")))
        assert code is grpc.StatusCode.NOT_FOUND
        known = "single_turn_agent, tool_agent, react_agent, math_expression, external"
        assert f"which is none of {known}; of " in said
        assert "did you mean 'obedient'?" in said
        ended = [
            sample.labels["agent"] for each in metrics.ENVIRONMENT_ENDED.collect() for sample in each.samples
        ]
        assert "other" in ended
        assert "obedeint" not in ended
        assert (await refused(stub.Act(turn("nobody", 1))))[0] is grpc.StatusCode.NOT_FOUND
        assert (await refused(stub.CloseEpisode(closing("nobody"))))[0] is grpc.StatusCode.NOT_FOUND


async def test_agents_are_described_and_an_unknown_one_is_named(tiny_model: Path, tmp_path: Path) -> None:
    async with environment(environment_job(tmp_path, tiny_model)) as client:
        described = await client.describe(DescribeRequest(agents=["obedient", "single_turn_agent"]))
        assert [(agent.name, list(agent.tools)) for agent in described.agents] == [
            ("obedient", []),
            ("single_turn_agent", []),
        ]
        with pytest.raises(UnknownAgent, match=r"agent_name is 'nobody', which is none of single_turn_agent,"):
            await client.describe(DescribeRequest(agents=["obedient", "nobody"]))


async def test_describing_more_agents_than_exist_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Before one of them is made."""
    async with stub_of(environment_job(tmp_path, tiny_model)) as stub:
        code, said = await refused(stub.Describe(DescribeRequest(agents=["obedient"] * 85_000)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "Describe names 85000 agents, and" in said


def test_every_call_may_be_repeated() -> None:
    from rolemesh.rpc.contract import rpcs

    assert [rpc.name for rpc in rpcs(ENVIRONMENT) if not rpc.pure] == []
