"""tool_agent and the calls of a turn, over a real channel: numbers worked by hand."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from environments import calling, closing, job_with, turn
from tool_plugins import agent, opened

from rolemesh.agents.truncation import truncated
from rolemesh.errors import EnvironmentFailed
from rolemesh.models.loading import load_tokenizer
from rolemesh.services.controller.conversations.conversation import ChatCodec
from rolemesh.services.environment.agents import tool_agent
from rolemesh.telemetry import metrics
from rolemesh.v1.environment_pb2 import ActRequest, DescribeRequest


async def test_calls_are_answered_in_their_order_by_name_and_id(
    tiny_model: Path, tmp_path: Path, parts: str
) -> None:
    tools = ["calculator", "repeat", "where", "slow"]
    async with agent(tmp_path, tiny_model, parts, tools=tools, max_parallel_calls=4) as client:
        described = await client.describe(DescribeRequest(agents=["tool_agent"]))
        schemas = [json.loads(tool) for tool in described.agents[0].tools]
        assert [schema["function"]["name"] for schema in schemas] == tools
        assert schemas[1]["function"]["parameters"] == {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "The text."},
                "times": {"type": "integer", "description": "How often."},
            },
            "required": ["text"],
        }
        await opened(client)
        answer = await client.act(
            turn(
                "a",
                1,
                "let me see",
                calling("slow", {"seconds": 0.05}, id="w"),
                calling("calculator", {"expression": "12,345 * 3 + 0.5"}, id="x"),
                calling("repeat", {"text": "ab"}, id="y"),
                calling("where", {"unit": "°C"}, id="z"),
            )
        )
        assert [(m.role, m.name, m.tool_call_id, m.content) for m in answer.messages] == [
            ("tool", "slow", "w", "slept on main: False"),
            ("tool", "calculator", "x", "37035.5"),
            ("tool", "repeat", "y", "abab"),
            ("tool", "where", "z", '{"main": true, "unit": "°C"}'),
        ]
        assert not answer.done
        assert [(use.name, use.error) for use in answer.tools] == [
            (tool, "") for tool in ("slow", "calculator", "repeat", "where")
        ]
        assert answer.tools[0].seconds >= 0.05
        last = await client.act(turn("a", 2, "it is 37035.5"))
        assert (last.done, last.why, list(last.messages)) == (True, "answered", [])
        end = await client.close_episode(closing("a"))
        assert (end.reward, dict(end.metrics)) == (0.0, {"num_tool_calls": 4.0})


async def test_the_policy_gets_the_error_of_a_call_that_cannot_be_run(
    tiny_model: Path, tmp_path: Path, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = ["calculator", "broken", "repeat", "hangs"]
    async with agent(tmp_path, tiny_model, parts, tools=tools, max_parallel_calls=7) as client:
        await opened(client)
        calls = [
            calling("calculate", {"expression": "1"}),
            calling("calculator", malformed="expected '}' at character 7"),
            calling("calculator", {"expression": "1/0"}),
            calling("repeat", {"txt": "ab"}),
            calling("broken", {"how": "lost"}),
            calling("broken", {"how": "exit"}),
            calling("broken", {"how": "stop"}),
            calling("calculator", {"expression": "1"}),
        ]
        before = metrics.TOOL_ERRORS.labels("broken")._value.get()
        answer = await client.act(turn("a", 1, "", *calls))
        monkeypatch.setattr(tool_agent, "TOOL_SHARE", 0.01)  # of 60 s
        late = await client.act(turn("a", 2, "", calling("hangs", {})))
    assert [message.content for message in answer.messages] == [
        "Error: there is no tool 'calculate'; the tools are calculator, broken, repeat, hangs",
        "Error: the call cannot be read: expected '}' at character 7",
        "Error: division by zero",
        "Error: missing a required argument: 'text'; the arguments are text, times",
        "Error: LookupError: lost",
        "Error: RuntimeError: SystemExit: 3",
        "Error: RuntimeError: StopIteration: ",
        "Error: at most 7 calls in a turn are run, so this one was not",
    ]
    assert [use.name for use in answer.tools] == ["none", *(call.name for call in calls[1:])]
    assert all(use.error for use in answer.tools)
    assert [(message.content, use.error) for message, use in zip(late.messages, late.tools, strict=True)] == [
        ("Error: it took longer than 0.6 s", "it took longer than 0.6 s")
    ]
    assert metrics.TOOL_ERRORS.labels("broken")._value.get() == before + 3


async def test_the_policy_reads_why_its_call_is_malformed(tiny_model: Path, tmp_path: Path) -> None:
    """As a format reads it: neither it nor the environment knows the name of such a call."""
    job = job_with(tmp_path, tiny_model, {"rollout": {"agent": {"default_agent_loop": "tool_agent"}}})
    written = (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1",}}</tool_call>'
        '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
        '<tool_call>{"name": "calculator", "arguments": [1]}</tool_call>'
    )
    message = ChatCodec(job, load_tokenizer(job.actor.model)).parse_turn(written, 1)
    async with agent(tmp_path, tiny_model, tools=["calculator"], max_parallel_calls=2) as client:
        await opened(client)
        answer = await client.act(ActRequest(episode="a", attempt=1, turn=1, message=message))
    not_json, right, no_object = answer.messages
    assert not_json.content.startswith("Error: the call cannot be read: not JSON: ")
    assert right.content == "1"
    assert "expected \"arguments\" of 'calculator' to be an object" in no_object.content
    assert [message.name for message in answer.messages] == ["none", "calculator", "none"]
    assert [use.name for use in answer.tools] == ["none", "calculator", "none"]


async def test_a_tool_that_fails_ends_the_run_where_the_job_says_so(
    tiny_model: Path, tmp_path: Path, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = {"tools": ["broken", "hangs", "calculator"], "on_tool_error": "fail", "max_parallel_calls": 3}
    async with agent(tmp_path, tiny_model, parts, **tools) as client:
        await opened(client)
        with pytest.raises(EnvironmentFailed, match=r"row row-a \(agent tool_agent\): tool broken: .* lost"):
            await client.act(turn("a", 1, "", calling("broken", {"how": "lost"})))
        await opened(client, "c")  # what the policy does wrong is no failure of a tool
        answer = await client.act(turn("c", 1, "", calling("unknown", {})))
        assert answer.messages[0].content.startswith("Error: there is no tool 'unknown'")
        wrong = ({"expr": "1"}, {"expression": "1 +"}, {"expression": 1})
        answer = await client.act(turn("c", 2, "", *(calling("calculator", each) for each in wrong)))
        assert [message.content for message in answer.messages] == [
            "Error: missing a required argument: 'expression'; the arguments are expression",
            "Error: '1 +' is no arithmetic expression (invalid syntax)",
            "Error: expression: 1 is not of type 'string'",
        ]
        await opened(client, "b")
        monkeypatch.setattr(tool_agent, "TOOL_SHARE", 0.01)  # of 60 s
        with pytest.raises(EnvironmentFailed, match=r"row row-b .*tool hangs: it took longer than 0.6 s"):
            await client.act(turn("b", 1, "", calling("hangs", {})))


async def test_a_hundred_blocking_tools_run_at_the_same_time(
    tiny_model: Path, tmp_path: Path, parts: str
) -> None:
    """Each waits for all others."""
    async with agent(tmp_path, tiny_model, parts, tools=["meets"]) as client:
        await asyncio.gather(*(opened(client, f"e{i}") for i in range(100)))
        meets = calling("meets", {})
        answers = await asyncio.gather(*(client.act(turn(f"e{i}", 1, "", meets)) for i in range(100)))
    assert {answer.messages[0].content for answer in answers} == {"met on main: False"}


@pytest.mark.parametrize(
    ("keep", "cut"),
    [
        ("left", "abcdef...(truncated)"),
        ("right", "(truncated)...uvwxyz"),
        ("middle", "ab...(truncated)...z"),
    ],
)
def test_a_long_answer_is_cut_to_its_length(keep: Any, cut: str) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    assert truncated(text, 20, keep) == cut
    assert len(cut) == 20
    assert truncated(text, 26, keep) == text
    assert truncated(cut, 20, keep) == cut
    assert [len(truncated(text, most, keep)) for most in range(1, 26)] == list(range(1, 26))
