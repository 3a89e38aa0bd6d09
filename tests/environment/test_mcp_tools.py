"""Tools of real MCP servers, over stdio and over HTTP: what they answer, and what they cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from environments import calling, job_with, opening, turn
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError
from serving import serve_process
from tool_plugins import agent, opened

from rolemesh.config.job import JobConfig, make_job
from rolemesh.errors import InvalidConfig
from rolemesh.methods import methods
from rolemesh.rpc.calling.episodes import EnvironmentClient
from rolemesh.services.environment.agents import tool_agent
from rolemesh.services.environment.agents.tool_agent import ToolAgent
from rolemesh.services.environment.mcp_tools.transports import next_message
from rolemesh.v1.environment_pb2 import DescribeRequest

SERVERS = Path(__file__).parents[1] / "support" / "servers"
SERVER, RAW_SERVER = str(SERVERS / "mcp_server.py"), str(SERVERS / "raw_mcp_server.py")


class Talk:
    """An episode whose turns are one call each."""

    def __init__(self, client: EnvironmentClient, name: str, log: Path) -> None:
        self.client, self.name, self.log, self.turns = client, name, log, 0

    async def __call__(self, tool: str, **arguments: Any) -> tuple[str, bool]:
        """Return a call's answer, and whether it counts as an error."""
        self.turns += 1
        answer = await self.client.act(turn(self.name, self.turns, "", calling(tool, arguments)))
        return answer.messages[0].content, bool(answer.tools[0].error)

    def starts(self) -> list[int]:
        """Process ids of the servers that have started."""
        return [int(line) for line in self.log.read_text().split()]


@contextmanager
def http_server(log: Path, how: str = "http") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, SERVER, str(log), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp", process
        finally:
            process.kill()


@asynccontextmanager
async def over_stdio(tmp_path: Path, model: Path, **config: Any) -> AsyncIterator[Talk]:
    log = tmp_path / "starts"
    server = {"command": [sys.executable, SERVER, str(log)], **config}
    async with talking(tmp_path, model, server) as talk:
        yield talk


@asynccontextmanager
async def over_http(tmp_path: Path, model: Path, how: str = "http") -> AsyncIterator[Talk]:
    with http_server(tmp_path / "starts", how) as (url, _):
        async with talking(tmp_path, model, {"url": url}) as talk:
            yield talk


@asynccontextmanager
async def talking(
    tmp_path: Path, model: Path, server: dict[str, Any], call_timeout_s: float = 240.0
) -> AsyncIterator[Talk]:
    settings = {"mcp_servers": {"mine": server}, "call_timeout_s": call_timeout_s, "tools": ["calculator"]}
    async with agent(tmp_path, model, **settings) as client:
        await opened(client)
        yield Talk(client, "a", tmp_path / "starts")


@asynccontextmanager
async def raw(tmp_path: Path, model: Path, answers: dict[str, Any], **of_a_tool: Any) -> AsyncIterator[Talk]:
    """A server whose tools have these answers, which are results, or lines as they are."""
    pages = {
        "": {"tools": [{"name": name, "inputSchema": {"type": "object"}, **of_a_tool} for name in answers]}
    }
    says = json.dumps({"pages": pages, "answers": answers})
    async with talking(tmp_path, model, {"command": [sys.executable, RAW_SERVER, says]}) as talk:
        yield talk


def raw_job(*tools: dict[str, Any], cursor: str | None = None) -> JobConfig:
    """A job with a server that offers these tools, on a page that every cursor leads to."""
    page = {"tools": list(tools), **({"nextCursor": cursor} if cursor else {})}
    return paged_job({"": page, **({cursor: page} if cursor else {})})


def paged_job(pages: dict[str, Any]) -> JobConfig:
    """A job with a server that offers these pages of tools, by cursor."""
    says = json.dumps({"pages": pages})
    servers = {"mine": {"command": [sys.executable, RAW_SERVER, says]}}
    return make_job({"rollout": {"multi_turn": {"enable": True, "mcp_servers": servers}}})


def text_of(text: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], **more}


Over = Callable[..., AbstractAsyncContextManager[Talk]]
over_json = partial(over_http, how="json")
both = pytest.mark.parametrize("over", [over_stdio, over_http], ids=["stdio", "http"])
each = pytest.mark.parametrize("over", [over_stdio, over_http, over_json], ids=["stdio", "http", "json"])


@both
async def test_a_servers_tools_are_offered_and_answer(tiny_model: Path, tmp_path: Path, over: Over) -> None:
    async with over(tmp_path, tiny_model) as call:
        described = await call.client.describe(DescribeRequest(agents=["tool_agent"]))
        tools = {
            tool["name"]: tool for tool in (json.loads(each)["function"] for each in described.agents[0].tools)
        }
        assert list(tools) == ["calculator", "add", "note", "fail", "die", "hang", "wait", "flood", "variable"]
        assert tools["add"]["description"] == "Add two numbers."
        assert tools["add"]["parameters"]["required"] == ["a"]
        assert tools["add"]["parameters"]["properties"]["a"]["type"] == "integer"
        assert await call("add", a=40) == ("42", False)
        assert await call("add", a="x") == ("Error: a: 'x' is not of type 'integer'", True)
        assert await call("add") == ("Error: 'a' is a required property", True)
        text, is_error = await call("fail", how="lost")
        assert text.startswith("Error: ToolError: ")
        assert "lost" in text
        assert is_error
        assert await call("note", text="one") == ("one", False)
        await opened(call.client, "b")
        assert await Talk(call.client, "b", call.log)("note", text="two") == ("one two", False)
        assert await call("calculator", expression="1 + 1") == ("2", False)
        assert len(call.starts()) == 1


async def beside_one_that_waits(call: Talk, pipe: Path, *calls: Callable[[], Awaitable[None]]) -> None:
    """Make calls while another one, on the same session, runs; then let that one be answered."""
    os.mkfifo(pipe)
    await opened(call.client, "b")
    waiting = asyncio.create_task(Talk(call.client, "b", call.log)("wait", pipe=str(pipe)))
    with await asyncio.to_thread(pipe.open, "w") as answer:  # opened when the server reads it
        for make in calls:
            await make()
        answer.write("after them")
    assert await waiting == ("after them", False)


@each
async def test_an_answer_of_many_megabytes_fails_only_its_own_call(
    tiny_model: Path, tmp_path: Path, over: Over
) -> None:
    """It is not read to its end."""
    async with over(tmp_path, tiny_model) as call:

        async def flood() -> None:
            text, is_error = await call("flood", megabytes=16)  # sixteen times what is read
            assert text.startswith("Error: ToolError: MCP server mine: MCPError: ")
            assert over is over_http or "the answer has more than 1048576 bytes" in text
            assert is_error
            assert await call("add", a=1) == ("3", False)

        await beside_one_that_waits(call, tmp_path / "pipe", flood, flood)
        assert len(call.starts()) == 1


@each
async def test_arguments_that_json_cannot_have_fail_their_call_alone(
    tiny_model: Path, tmp_path: Path, over: Over
) -> None:
    async with over(tmp_path, tiny_model) as call:

        async def half_a_pair() -> None:
            text, is_error = await call("note", text="\ud800")
            assert text.startswith(r"Error: the arguments have '\ud800', half of a surrogate pair")
            assert is_error
            assert await call("add", a=1) == ("3", False)

        await beside_one_that_waits(call, tmp_path / "pipe", half_a_pair)
        assert len(call.starts()) == 1


@pytest.mark.parametrize(
    ("begin", "end", "asked"),
    [
        ('{"jsonrpc":"2.0","id":7,"result":{"text":"', '"}}', 7),
        ('{"id": "7", "jsonrpc": "2.0", "error": {"message": "', '"}}', 7),
        ('{"result":{"id":8,"text":"', '"},"jsonrpc":"2.0","id":7}', 7),
        ('{"result":{"id":8,"text":"', '\\",\\"id\\":8}"},"id":7,"jsonrpc":"2.0"}', 7),
        ('{"jsonrpc":"2.0","id":7,"method":"sampling/createMessage","params":{"text":"', '"}}', None),
        ('{"jsonrpc":"2.0","method":"notifications/message","params":{"text":"', '","id":7}}', None),
    ],
)
async def test_a_response_too_long_names_its_call_at_either_end(
    begin: str, end: str, asked: int | None
) -> None:
    for size in (64, 100, 1000, 100_000):
        stdout = asyncio.StreamReader(limit=64)
        after = '{"jsonrpc":"2.0","id":9,"result":{}}'
        stdout.feed_data(f"{begin}{'x' * size}{end}\n{after}\n".encode())
        stdout.feed_eof()
        first = await next_message(stdout)
        if asked is None:
            assert isinstance(first, ValueError)
        else:
            assert isinstance(first, SessionMessage)
            assert isinstance(first.message, JSONRPCError)
            assert first.message.id == asked
        second = await next_message(stdout)
        assert isinstance(second, SessionMessage)
        assert second.message.id == 9
        assert await next_message(stdout) is None


async def test_an_unparsable_answer_fails_only_its_call_and_at_once(tiny_model: Path, tmp_path: Path) -> None:
    """The time limit of the call is 240 s; that of a test is shorter."""
    line = '{"jsonrpc":"2.0","id":ID,"result":{"content":[{"type":"text","text":"%s"}]}}'
    answers = {
        "half": line % r"\ud800",
        "latin": line % "caf\xe9",
        "last": '{"result":{"content":[{"type":"text","text":"\xe9"}]},"jsonrpc":"2.0","id":ID}',
        "no_object": '{"jsonrpc":"2.0","id":ID,"result":[1]}',
        "no_result": {"content": 7},
        "good": text_of("fine"),
    }
    async with raw(tmp_path, tiny_model, answers) as call:
        said = {name: await call(name) for name in answers}
    before = "Error: ToolError: MCP server mine: "
    why = f"{before}MCPError: the answer cannot be read: "
    assert said["half"][0].startswith(f"{why}Invalid JSON: unexpected end of hex escape")
    assert said["latin"][0].startswith(f"{why}Invalid JSON: invalid unicode code point")
    assert said["last"][0].startswith(f"{why}Invalid JSON: invalid unicode code point")
    assert said["no_object"][0] == f"{why}it is no message of JSON-RPC"
    assert said["no_result"][0].startswith(f"{before}ValidationError: ")
    assert said["good"] == ("fine", False)


async def test_an_answer_in_text_alone_is_read_with_any_output_schema(tiny_model: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    async with raw(tmp_path, tiny_model, {"count": text_of("n is 3")}, outputSchema=schema) as call:
        assert await call("count") == ("n is 3", False)


async def test_an_answer_has_embedded_texts_and_structured_content(tiny_model: Path, tmp_path: Path) -> None:
    """Structured content that a text repeats is left out."""
    file = {"uri": "file:///notes.txt", "mimeType": "text/plain"}
    rows = [{"n": 1}, {"n": 2}]
    answers = {
        "file": {"content": [{"type": "resource", "resource": {**file, "text": "two lines"}}]},
        "bytes": {"content": [{"type": "resource", "resource": {**file, "blob": "AAAA"}}]},
        "points": text_of("see the structured content", structuredContent={"n": 3}),
        "alone": {"content": [], "structuredContent": {"n": 3}},
        "repeats": text_of('{\n "n": 3\n}', structuredContent={"n": 3}),
        "number": text_of("42", structuredContent={"result": 42}),
        "digits": text_of("42", structuredContent={"result": "42"}),
        "items": {
            "content": [{"type": "text", "text": json.dumps(row)} for row in rows],
            "structuredContent": {"result": rows},
        },
    }
    async with raw(tmp_path, tiny_model, answers) as call:
        said = {name: await call(name) for name in answers}
    assert said == {
        "file": ("two lines", False),
        "bytes": ("(resource)", False),
        "points": ('see the structured content\n{"n": 3}', False),
        "alone": ('{"n": 3}', False),
        "repeats": ('{\n "n": 3\n}', False),
        "number": ("42", False),
        "digits": ("42", False),
        "items": ('{"n": 1}\n{"n": 2}', False),
    }


async def test_a_server_that_dies_is_started_anew_for_the_next_call(tiny_model: Path, tmp_path: Path) -> None:
    async with over_stdio(tmp_path, tiny_model) as call:
        assert await call("die") == ("Error: ToolError: MCP server mine: MCPError: Connection closed", True)
        assert await call("add", a=1) == ("3", False)
        assert len(call.starts()) == 2
        await asyncio.to_thread(killed, call.starts()[1])
        assert (await call("add", a=1))[1]
        assert await call("add", a=1) == ("3", False)
        assert len(call.starts()) == 3


async def test_a_server_that_hangs_is_started_anew(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over_stdio(tmp_path, tiny_model) as call:
        assert await call("add", a=0) == ("2", False)  # a start may take longer than a second
        with monkeypatch.context() as shorter:
            shorter.setattr(tool_agent, "TOOL_SHARE", 1 / 240)  # for the call that hangs alone
            assert await call("hang") == ("Error: it took longer than 1 s", True)
        assert await call("add", a=1) == ("3", False)
        assert len(call.starts()) == 2


async def test_a_server_at_a_url_is_reached_without_a_proxy(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is gone is an error of each call."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http_server(tmp_path / "starts") as (url, process):
        async with talking(tmp_path, tiny_model, {"url": url}) as call:
            assert await call("add", a=1) == ("3", False)
            process.kill()
            process.wait()
            for _ in range(2):
                text, is_error = await call("add", a=1)
                assert text.startswith("Error: ")
                assert is_error
            assert await call("calculator", expression="1 + 1") == ("2", False)


async def test_a_program_gets_only_the_variables_that_the_job_names(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "secret")
    monkeypatch.setenv("OTHER_OF_MINE", "other")
    async with over_stdio(tmp_path, tiny_model, env=["TOKEN_OF_MINE"]) as call:
        assert await call("variable", name="TOKEN_OF_MINE") == ("secret", False)
        assert await call("variable", name="OTHER_OF_MINE") == ("(none)", False)


# ------------------------------------------------------------------------------------ at start


@pytest.mark.parametrize(
    ("server", "said", "timeout_s"),
    [
        (
            {"command": ["no-such-program-of-mine"]},
            "command: 'no-such-program-of-mine' is not there, or not executable; correct the path, or install",
            60.0,
        ),
        (
            {"command": [sys.executable, "/no/such/server.py"]},
            "command: `.* /no/such/server.py` ended before it listed its tools; .* run it by hand",
            60.0,
        ),
        ({"command": ["sleep", "3600"]}, "command: sleep 3600 did not answer in 0.5 s", 0.5),
        (
            {"url": "http://127.0.0.1:9/mcp"},
            "url: the tools of http://127.0.0.1:9/mcp cannot be listed: ",
            60.0,
        ),
        (
            {"url": "http://127.0.0.1:9/mcp", "headers": {"X-Key": "NO_SUCH_VARIABLE"}},
            "url: .*NO_SUCH_VARIABLE, which is not",
            60.0,
        ),
    ],
)
def test_a_server_that_is_not_there_is_an_error_at_start(
    server: dict[str, Any], said: str, timeout_s: float
) -> None:
    multi_turn = {"enable": True, "mcp_servers": {"mine": server}, "call_timeout_s": timeout_s}
    job = make_job({"rollout": {"multi_turn": multi_turn}})
    with pytest.raises(InvalidConfig, match=rf"rollout\.multi_turn\.mcp_servers\.mine\.{said}"):
        ToolAgent(job)


def tool_names(job: JobConfig) -> list[str]:
    agent = ToolAgent(job)
    try:
        return [tool["function"]["name"] for tool in agent.tools]
    finally:
        agent.close()


def test_an_invalid_output_schema_does_not_cost_the_other_tools() -> None:
    one = {"name": "one", "inputSchema": {"type": "object"}, "outputSchema": [1]}
    two = {"name": "two", "inputSchema": {"type": "object"}}
    assert tool_names(raw_job(one, two)) == ["one", "two"]


def test_a_cursor_that_repeats_the_same_page_ends_the_list() -> None:
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in ("one", "two")]
    assert tool_names(raw_job(*tools, cursor="next")) == ["one", "two"]


def test_an_empty_or_repeated_page_does_not_cost_later_tools() -> None:
    one, two = ({"name": name, "inputSchema": {"type": "object"}} for name in ("one", "two"))
    pages = {
        "": {"tools": [one], "nextCursor": "empty"},
        "empty": {"tools": [], "nextCursor": "repeated"},
        "repeated": {"tools": [one], "nextCursor": "last"},
        "last": {"tools": [two]},
    }
    assert tool_names(paged_job(pages)) == ["one", "two"]


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"properties": {"a": {"$ref": "https://schemas.example/a.json"}}}, "https://schemas.example/a.json"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}}, "/$defs/A"),
        ({"$ref": "#/components/A", "components": {"A": {"items": {"$ref": "other.json#/B"}}}}, "other.json"),
        ({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"items": {"$ref": "#/$defs/A"}}}}, ""),
        ({"properties": {"a": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}}, ""),
        ({"properties": {"$ref": {"type": "string"}}}, ""),
    ],
)
def test_a_schema_with_a_missing_reference_is_refused_at_start(schema: dict[str, Any], refused: str) -> None:
    job = raw_job({"name": "one", "inputSchema": {"type": "object", **schema}})
    if not refused:
        assert tool_names(job) == ["one"]
        return
    with pytest.raises(InvalidConfig, match=r"mcp_servers.mine: tool 'one' .* nothing is fetched") as error:
        ToolAgent(job)
    assert refused in str(error.value)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({}, "either command or url"),
        ({"command": ["x"], "url": "http://x"}, "either command or url"),
        ({"url": "ftp://x"}, "http:// or https:// expected"),
        ({"url": "http://x", "env": ["A"]}, "env is for a command"),
        ({"comand": ["x"]}, "unknown key 'rollout.multi_turn.mcp_servers.mine.comand'"),
    ],
)
def test_a_server_that_is_none_is_refused(server: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        make_job({"rollout": {"multi_turn": {"enable": True, "mcp_servers": {"mine": server}}}})


# ------------------------------------------------------------------------------------- its end


def killed(pid: int) -> None:
    ended = os.pidfd_open(pid)
    os.kill(pid, 9)
    assert select.select([ended], [], [], 60)[0]


async def test_a_server_ends_with_the_role_that_started_it(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "starts"
    sections = {"rollout": {"agent": {"default_agent_loop": "tool_agent"}}}
    servers = {"mine": {"command": [sys.executable, SERVER, str(log)]}}
    job = job_with(tmp_path, tiny_model, sections, mcp_servers=servers)
    async with (
        serve_process("environment", job, tmp_path) as role,
        EnvironmentClient([role.address], methods(job)) as client,
    ):
        await client.wait_until_ready(60)
        await client.open_episode(opening("a", "tool_agent"))
        hanging = asyncio.create_task(Talk(client, "a", log)("hang"))  # which reads no end of its input
        ended = os.pidfd_open(int(log.read_text()))
        role.process.kill()
        assert (await asyncio.to_thread(select.select, [ended], [], [], 60))[0]
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
