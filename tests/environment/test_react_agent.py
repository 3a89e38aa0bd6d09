"""react_agent and math_expression: their tools, their end, and rows of several agents side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from environments import calling, closing, opening, turn
from tool_plugins import agent

from rolemesh.errors import InvalidData
from rolemesh.services.environment.tools.own_operator import calculate
from rolemesh.v1.environment_pb2 import DescribeRequest


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 @ 2", "5"),
        ("3 @ 2 @ 1", "13"),  # (3 @ 2) @ 1
        ("3 @ (2 @ 1)", "1"),
        ("1 + 3 @ 2", "6"),
        ("2 * 3 @ 2", "14"),  # (2 * 3) @ 2
        ("-5 @ 2 - 1", "-20"),
        ("3 @ (9 @ 4 @ 4) @ (2 @ 2 @ 2)", "-271"),
    ],
)
def test_the_operator_is_three_times_left_minus_twice_right(expression: str, result: str) -> None:
    """The last one: 9@4@4 = 19@4 = 49 and 2@2@2 = 2@2 = 2; 3@49 = -89, and -89@2 = -271."""
    assert calculate(expression) == result


@pytest.mark.parametrize("expression", ["3 @", "x @ 1", "@", "(" * 900, "1@" * 900 + "1", "1@[1]"])
def test_text_that_is_not_an_expression_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|neither|bits"):
        calculate(expression)


async def test_agents_of_several_rows_answer_side_by_side(tiny_model: Path, tmp_path: Path) -> None:
    agents = ["tool_agent", "react_agent", "math_expression"]
    async with agent(tmp_path, tiny_model, tools=["calculator"]) as client:
        described = await client.describe(DescribeRequest(agents=agents))
        names = [json.loads(tool)["function"]["name"] for each in described.agents for tool in each.tools]
        assert names == ["calculator", "calculator", "calculate"]
        for name in agents:
            await client.open_episode(opening(name, name))
        sums = [calling("calculator", {"expression": "3 * 2"})] * 2 + [
            calling("calculate", {"expression": "3@2"})
        ]
        said = []
        for name, call in zip(agents, sums, strict=True):
            said.append((await client.act(turn(name, 1, "I compute it.", call))).messages[0].content)
            last = await client.act(turn(name, 2, "So it is."))
            assert (last.done, last.why) == (True, "answered")
            assert (await client.close_episode(closing(name))).metrics["num_tool_calls"] == 1
        assert said == ["6", "6", "5"]
        with pytest.raises(InvalidData, match=r"interaction_kwargs.name is 'gsm8k'; there is no"):
            await client.open_episode(opening("x", "react_agent", interaction_kwargs={"ground_truth": "1"}))
