"""Functions as tools, over a real channel: which arguments they get, and what they may return."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import calling, turn
from tool_plugins import agent, opened

from rolemesh.catalog.plugin_imports import forget
from rolemesh.errors import EnvironmentFailed
from rolemesh.rpc.calling.episodes import EnvironmentClient
from rolemesh.v1.environment_pb2 import DescribeRequest

PLUGIN = '''
import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NewType

import numpy

from rolemesh.plugins import tool


@tool("heat")
def heat(unit: Literal["c", "f"], times: int | None = 1, steps: list[int] | None = None) -> str:
    """Heat it.

    Args:
        unit: The unit.
        times: How often.
        steps: Of what size.
    """
    return f"{unit} {times} {steps}"


VALUES = {
    "none": None,
    "date": datetime.date(2024, 2, 29),
    "bytes": b"caf\\xc3\\xa9",
    "integer": numpy.int64(7),
    "array": numpy.array([[1, 2], [3, 4]]),
    "set": {"b", "c", "a"},
    "inside": {"at": [datetime.datetime(2024, 2, 29, 12), None], "n": numpy.float32(0.5)},
    "latin": b"caf\\xe9",
    "object": object(),
    "half": "x\\ud800",
}


@tool("value")
def value(of: str) -> Any:
    """Return a value.

    Args:
        of: Its name.
    """
    return VALUES[of]


@tool("echo")
async def echo(text: str, more: dict | None = None) -> str:
    """Return a text.

    Args:
        text: The text.
        more: Ignored.
    """
    return text


@tool("quotes")
def quotes() -> str:
    """Fail with half of a surrogate pair."""
    raise LookupError("x\\ud800")


@tool("search")
def search(query: str, *more: str, top: int = 1, **options: str) -> str:
    """Search.

    Args:
        query: What for.
        more: Never given.
        top: How many.
        options: Any further ones.
    """
    return f"{query} {more} {top} {options}"


class Unit(str, Enum):
    C = "c"


User = NewType("User", str)


@tool("dates")
def dates(
    unit: Unit, user: User, on: datetime.date | None, files: list[Path], pages: int, more: dict[str, int]
) -> str:
    """Take what JSON does not have.

    Args:
        unit: An enum.
        user: A type of its own.
        on: A date.
        files: Paths.
        pages: A number.
        more: Numbers.
    """
    return f"{unit} {user} {on} {files} {pages} {more}"
'''
TOOLS = ["heat", "value", "echo", "quotes", "search", "dates"]


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "function_tools.py").write_text(PLUGIN)
    yield str(tmp_path / "function_tools.py")
    forget(str(tmp_path / "function_tools.py"))


async def answers(client: EnvironmentClient, *calls: tuple[str, object]) -> list[str]:
    """Make the calls in one turn of an episode of their own."""
    await opened(client)
    said = await client.act(turn("a", 1, "", *(calling(tool, arguments) for tool, arguments in calls)))  # type: ignore[arg-type]
    for message, use in zip(said.messages, said.tools, strict=True):
        assert message.content.startswith("Error: ") == bool(use.error)
    return [message.content for message in said.messages]


async def test_arguments_are_checked_against_the_offered_schema(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    calls = [
        ("heat", {"unit": "x"}),
        ("heat", {"unit": "c", "times": "2"}),
        ("heat", {"unit": "c", "steps": [1, "2"]}),
        ("heat", {"times": 1}),
        ("heat", {"unit": "f", "times": None, "steps": None}),
        ("heat", {"unit": "c", "steps": [2]}),
    ]
    settings = {"tools": TOOLS, "max_parallel_calls": len(calls), "on_tool_error": "fail"}
    async with agent(tmp_path, tiny_model, plugin, **settings) as client:
        assert await answers(client, *calls) == [
            "Error: unit: 'x' is not one of ['c', 'f']",
            "Error: times: '2' is not of type 'integer', 'null'",
            "Error: steps: 1: '2' is not of type 'integer'",
            "Error: missing a required argument: 'unit'; the arguments are unit, times, steps",
            "f None None",
            "c 1 [2]",
        ]


async def test_unnamed_arguments_are_not_offered_but_are_accepted(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    calls = [
        ("search", {"query": "a"}),
        ("search", {"query": "a", "top": 2, "site": "b"}),
        ("search", {"query": "a", "top": "2"}),
        ("search", {"top": 2}),
    ]
    async with agent(tmp_path, tiny_model, plugin, tools=TOOLS, max_parallel_calls=len(calls)) as client:
        described = await client.describe(DescribeRequest(agents=["tool_agent"]))
        offered = [json.loads(each)["function"] for each in described.agents[0].tools]
        [parameters] = [each["parameters"] for each in offered if each["name"] == "search"]
        assert await answers(client, *calls) == [
            "a () 1 {}",
            "a () 2 {'site': 'b'}",
            "Error: top: '2' is not of type 'integer'",
            "Error: missing a required argument: 'query'; the arguments are query, top",
        ]
    assert list(parameters["properties"]) == ["query", "top"]
    assert parameters["required"] == ["query"]


async def test_arguments_with_hints_that_json_lacks_are_not_checked(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    given = {"unit": "c", "user": "eve", "on": "2024-02-29", "files": ["a"], "pages": 1, "more": {"a": 1}}
    calls = [("dates", given), ("dates", {**given, "pages": "1"}), ("dates", {**given, "more": "a"})]
    async with agent(tmp_path, tiny_model, plugin, tools=TOOLS, max_parallel_calls=len(calls)) as client:
        assert await answers(client, *calls) == [
            "c eve 2024-02-29 ['a'] 1 {'a': 1}",
            "Error: pages: '1' is not of type 'integer'",
            "Error: more: 'a' is not of type 'object'",
        ]


async def test_a_functions_result_becomes_text_or_an_error_naming_it(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    texts = {
        "none": "",
        "date": '"2024-02-29"',
        "bytes": '"café"',
        "integer": "7",
        "array": "[[1, 2], [3, 4]]",
        "set": '["a", "b", "c"]',
        "inside": '{"at": ["2024-02-29T12:00:00", null], "n": 0.5}',
    }
    calls = [("value", {"of": name}) for name in (*texts, "latin", "object")]
    async with agent(tmp_path, tiny_model, plugin, tools=TOOLS, max_parallel_calls=len(calls)) as client:
        *said, latin, thing = await answers(client, *calls)
    assert said == list(texts.values())
    assert latin.startswith(
        r"Error: TypeError: the tool's return value b'caf\xe9' (bytes) is neither a text nor"
    )
    assert thing.startswith("Error: TypeError: the tool's return value <object object at 0x")


async def test_a_tools_lone_surrogate_is_an_error_the_policy_reads(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    calls: list[tuple[str, object]] = [
        ("value", {"of": "half"}),
        ("quotes", {}),
        ("echo", '{"text": "\\ud800"}'),
        ("echo", '{"text": "", "more": {"\\udfff": 1}}'),
        ("echo", '{"text": "\\ud83d\\ude00"}'),
    ]
    async with agent(tmp_path, tiny_model, plugin, tools=TOOLS, max_parallel_calls=5) as client:
        returned, raised, text, key, whole = await answers(client, *calls)
    assert returned.startswith(r"Error: ValueError: the tool's return value 'x\ud800' is no UTF-8 text")
    assert raised == r"Error: LookupError: x\ud800"
    assert text.startswith(r"Error: the arguments have '\ud800', half of a surrogate pair")
    assert key.startswith(r"Error: the arguments have '\udfff', half of a surrogate pair")
    assert whole == "😀"


async def test_a_policys_lone_surrogate_does_not_end_the_run(
    tiny_model: Path, tmp_path: Path, plugin: str
) -> None:
    async with agent(tmp_path, tiny_model, plugin, tools=TOOLS, on_tool_error="fail") as client:
        (said,) = await answers(client, ("echo", '{"text": "\\ud800"}'))
        assert said.startswith("Error: the arguments have ")
        with pytest.raises(EnvironmentFailed, match=r"tool value: .* return value .* is no UTF-8 text"):
            await client.act(turn("a", 2, "", calling("value", {"of": "half"})))
