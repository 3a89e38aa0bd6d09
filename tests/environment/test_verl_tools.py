"""verl's YAML files of tools and interactions, their life cycles and rewards, and what is wrong at start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from environments import calling, closing, job_with, turn
from serving import serve_process
from tool_plugins import SCHEMA, agent, opened, tools_file

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config.job import make_job
from rolemesh.config.reward import RewardConfig
from rolemesh.errors import EnvironmentFailed, InvalidConfig, InvalidData
from rolemesh.services.environment.agents.tool_agent import ToolAgent
from rolemesh.services.reward.functions import default_compute_score
from rolemesh.v1.environment_pb2 import DescribeRequest

# --------------------------------------------------------------------------------------- tools

GSM8K = {
    "class_name": "verl.tools.gsm8k_tool.Gsm8kTool",
    "config": {"type": "native"},
    "tool_schema": {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "A tool for calculating the reward of gsm8k.",
            "parameters": {
                "type": "object",
                "properties": {"answer": {"type": "string", "description": "The answer, digits"}},
                "required": ["answer"],
            },
        },
    },
}


async def test_verls_gsm8k_tool_penalizes_answers_without_progress(tiny_model: Path, tmp_path: Path) -> None:
    file = tools_file(tmp_path, GSM8K)
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72", "other": None}}}
    async with agent(tmp_path, tiny_model, tool_config_path=file) as client:
        described = await client.describe(DescribeRequest(agents=["tool_agent"]))
        assert json.loads(described.agents[0].tools[0]) == GSM8K["tool_schema"]
        await opened(client, need_tools_kwargs=True, tools_kwargs=kwargs)
        rewards, texts = [], []
        for number, answer in enumerate(["70", "72", "72", "#### 71"], start=1):
            said = await client.act(turn("a", number, "", calling("calc_gsm8k_reward", {"answer": answer})))
            rewards.append(said.reward)
            texts.append(said.messages[0].content)
        assert rewards == [-0.05, 0.0, -0.05, -0.05]
        assert texts[1] == "Current parsed answer='72' reward=1.0"
        end = await client.close_episode(closing("a"))
        assert end.reward == 0.0  # the last answer counts
        await opened(client, "b", tools_kwargs=kwargs)
        await client.act(turn("b", 1, "", calling("calc_gsm8k_reward", {"answer": "72"})))
        end = await client.close_episode(closing("b"))
        assert (end.reward, end.metrics["tool_reward/calc_gsm8k_reward"]) == (1.0, 1.0)
        with pytest.raises(EnvironmentFailed, match=r"row row-c .*create_kwargs.ground_truth"):
            await opened(client, "c", tools_kwargs={"calc_gsm8k_reward": {}})


async def test_a_tools_life_cycle_and_its_rewards(tiny_model: Path, tmp_path: Path, parts: str) -> None:
    entries: list[dict[str, Any]] = [{"class_name": "ledger_parts.Ledger", "tool_schema": SCHEMA}]
    old = json.loads(json.dumps(SCHEMA))
    old["function"]["name"] = "old"
    entries.append({"class_name": "ledger_parts.OldLedger", "config": {}, "tool_schema": old})
    kwargs = {
        "ledger": {
            "create_kwargs": {"page": 3},
            "execute_kwargs": {"ink": "blue"},
            "calc_reward_kwargs": {"tax": 1},
            "release_kwargs": {"force": True},
        },
        "old": {"create_kwargs": {"ground_truth": "7"}},
        "unused": None,  # as Parquet fills in
    }
    file = tools_file(tmp_path, *entries)
    async with agent(tmp_path, tiny_model, tool_config_path=file, max_parallel_calls=3) as client:
        import ledger_parts  # type: ignore[import-not-found]

        ledger_parts.Ledger.written.clear()
        await opened(client, tools_kwargs=kwargs)
        said = await client.act(
            turn("a", 1, "", *(calling("ledger", {"reward": r}) for r in (0.25, 1)), calling("old", {}))
        )
        assert [message.content for message in said.messages] == ["noted"] * 3
        assert said.reward == 1.25
        end = await client.close_episode(closing("a"))
    assert ledger_parts.Ledger.written == [
        ("create", {"create_kwargs": {"page": 3}, "page": 3}),
        ("create", "7"),
        ("execute", {"reward": 0.25}, {"ink": "blue"}),
        ("execute", {"reward": 1}, {"ink": "blue"}),
        ("calc_reward", {"tax": 1}),
        ("release", {"force": True}),
        ("calc_reward", {}),
        ("release", {}),
    ]
    assert end.reward == 4.0
    assert end.metrics["num_tool_calls"] == 3.0


async def test_a_reward_of_a_tool_that_is_no_number_fails_the_episode(
    tiny_model: Path, tmp_path: Path, parts: str
) -> None:
    file = tools_file(tmp_path, {"class_name": "ledger_parts.Ledger", "tool_schema": SCHEMA})
    async with agent(tmp_path, tiny_model, tool_config_path=file) as client:
        await opened(client)
        with pytest.raises(EnvironmentFailed, match=r"row row-a \(agent tool_agent\): .*the reward is inf"):
            await client.act(turn("a", 1, "", calling("ledger", {"reward": 1e999})))


# -------------------------------------------------------------------------------- interactions


async def test_the_gsm8k_interaction_says_what_is_wrong_until_right(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "interactions.yaml"
    file.write_text(
        "interaction:\n"
        '  - name: "gsm8k"\n'
        '    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"\n'
        "    config: {}\n"
    )
    kwargs = {"name": "gsm8k", "query": "How many?", "ground_truth": "72"}
    async with agent(tmp_path, tiny_model, tools=["calculator"], interaction_config_path=str(file)) as client:
        await opened(client, interaction_kwargs=kwargs)
        seen = []
        for number, said in enumerate(["I think 72", "#### 70", "", "So it is #### 72"], start=1):
            calls = [calling("calculator", {"expression": "8*9"})] if number == 3 else []
            answer = await client.act(turn("a", number, said, *calls))
            seen.append((answer.done, answer.reward, [(m.role, m.content[:33]) for m in answer.messages]))
        end = await client.close_episode(closing("a"))
        await opened(client, "b", interaction_kwargs=kwargs)
        await client.act(turn("b", 1, "#### 1"))
        assert (await client.close_episode(closing("b"))).reward == 0.0  # in the middle
    assert seen == [
        (False, 0.0, [("user", "Your response has no final answer")]),
        (False, 0.0, [("user", "Your response is incorrect! You n")]),
        (False, 0.0, [("tool", "72")]),
        (True, 0.0, []),
    ]
    assert (answer.why, end.reward, end.metrics["interaction_score"]) == ("interaction ended", 1.0, 1.0)


@pytest.mark.parametrize("rules", ["rolemesh", "verl"])
async def test_no_rule_takes_the_interactions_words_for_an_answer(
    tiny_model: Path, tmp_path: Path, rules: Any
) -> None:
    """The text that a rule gets is the whole row: the turns, and what the interaction says between them."""
    said = ["I think we add them.", "#### 3", "#### nine", "Sorry, I do not know."]
    async with agent(tmp_path, tiny_model) as client:
        await opened(client, interaction_kwargs={"name": "gsm8k", "ground_truth": "42"})
        answers = [await client.act(turn("a", number, words)) for number, words in enumerate(said, start=1)]
    no_answer, wrong, no_number, sorry = (answer.messages[0].content for answer in answers)
    assert no_answer == no_number == sorry != wrong
    config = RewardConfig(rules=rules, format_score=0.1)
    for truth, row in (("42", f"{said[0]}{no_answer}{said[3]}"), ("3", f"{said[0]}{wrong}{said[3]}")):
        scored = default_compute_score("openai/gsm8k", row, truth, config=config)
        assert isinstance(scored, Mapping)
        assert scored["score"] == scored["acc"] == 0.0


@pytest.mark.parametrize("by_file", [False, True])
async def test_the_interaction_finds_the_answer_where_the_reward_does(
    tiny_model: Path, tmp_path: Path, by_file: bool
) -> None:
    file = tmp_path / "interactions.yaml"
    entry = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction", "config": {}}
    file.write_text(yaml.safe_dump({"interaction": [entry]}))
    path = {"interaction_config_path": str(file)} if by_file else {}
    seen = []
    for answer_chars in (300, None, 400):
        async with agent(
            tmp_path, tiny_model, sections={"reward": {"answer_chars": answer_chars}}, **path
        ) as client:
            await opened(client, interaction_kwargs={"name": "gsm8k", "ground_truth": "5"})
            answer = await client.act(turn("a", 1, "#### 5\n" + 300 * "."))
            seen.append((answer.done, (await client.close_episode(closing("a"))).reward))
    assert seen == [(False, 0.0), (True, 1.0), (True, 1.0)]


async def test_an_interaction_of_ones_own(tiny_model: Path, tmp_path: Path, parts: str) -> None:
    file = tmp_path / "interactions.yaml"
    entry = {"class_name": "ledger_parts.PoliteInteraction", "config": {"word": "please"}}
    file.write_text(yaml.safe_dump({"interaction": [entry]}))
    async with agent(tmp_path, tiny_model, interaction_config_path=str(file)) as client:
        await opened(client, interaction_kwargs={"name": "polite", "most": 2})
        first = await client.act(turn("a", 1, "one"))
        assert (first.reward, first.messages[0].content) == (0.125, "please, 2")
        second = await client.act(turn("a", 2, "two"))
        assert (second.done, second.reward) == (True, 0.125)
        assert (await client.close_episode(closing("a"))).reward == 4.0
        with pytest.raises(InvalidData, match=r"row row-b .*name is 'rude'; there is polite \(rollout.multi"):
            await opened(client, "b", interaction_kwargs={"name": "rude"})
        with pytest.raises(InvalidData, match=r"row row-c .*tools_kwargs names the tool 'x'; there are no"):
            await opened(client, "c", tools_kwargs={"x": {}})
        with pytest.raises(InvalidData, match=r"row row-d .*tools_kwargs should be a dict"):
            await opened(client, "d", tools_kwargs=[1])


# ------------------------------------------------------------------------------------ at start


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([{"class_name": "nowhere.to.Find"}], r"tool 1: nowhere.to.Find cannot be imported: No module named"),
        ([{"class_name": "ledger_parts.Absent"}], r"cannot be imported: AttributeError"),
        ([{"class_name": 7}], r"class_name is 7; package.module.Class expected"),
        ([{"class_name": "ledger_parts.Ledger", "schema": {}}], r"unknown key 'schema' in tools; there are"),
        (
            [{"class_name": "ledger_parts.Ledger", "tool_schema": {"type": "f"}}],
            r"tool 1, ledger_parts.Ledger: ",
        ),
        ([{"class_name": "ledger_parts.Ledger"}], r"tool 1, ledger_parts.Ledger: AttributeError"),
        (
            [
                {
                    "class_name": "ledger_parts.Ledger",
                    "tool_schema": {
                        "type": "function",
                        "function": {"name": "x", "parameters": {"type": "array"}},
                    },
                }
            ],
            r"tool Ledger has no valid schema: parameters should be a JSON schema of type object",
        ),
        ([{"class_name": "ledger_parts.Ledger", "tool_schema": SCHEMA}] * 2, r"names two tools 'ledger'"),
        (["ledger"], r"tools should be a list of sections with class_name, config, tool_schema"),
    ],
)
def test_a_tool_that_cannot_be_made_is_an_error_at_start(
    tiny_model: Path, tmp_path: Path, parts: str, entries: Any, words: str
) -> None:
    job = job_with(tmp_path, tiny_model, {}, tool_config_path=tools_file(tmp_path, *entries))
    with pytest.raises(InvalidConfig, match=words):
        ToolAgent(job)


def test_a_function_without_hints_or_docstring_is_no_tool(tiny_model: Path, tmp_path: Path, parts: str) -> None:
    for index, function in enumerate(("def f(x: int): ...", 'def f(x):\n    """Do."""', "def f(): ...")):
        file = tmp_path / f"bad{index}.py"
        file.write_text(f"from rolemesh.plugins import tool\n@tool('bad')\n{function}\n")
        job = job_with(tmp_path, tiny_model, {"plugins": [str(file)]}, tools=["bad"])
        with pytest.raises(InvalidConfig, match=r"tool bad: .* type hints, and a docstring"):
            ToolAgent(job)
        forget(str(file))


def test_an_unknown_name_of_a_tool_or_agent_names_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match=r"is 'calculater', which is none of calculator, calc_gsm8k_r"):
        make_job({"rollout": {"multi_turn": {"enable": True, "tools": ["calculater"]}}})
    with pytest.raises(InvalidConfig, match=r"is 'tools_agent', which is none of single_turn_agent, "):
        make_job({"rollout": {"agent": {"default_agent_loop": "tools_agent"}}})


async def test_a_role_whose_tools_cannot_be_made_does_not_start(tiny_model: Path, tmp_path: Path) -> None:
    job = job_with(tmp_path, tiny_model, {}, tool_config_path=str(tmp_path / "absent.yaml"))
    async with serve_process("environment", job, tmp_path) as role:
        assert role.process.stderr is not None
        errors = await role.process.stderr.read()  # to its end, which comes with the process's
        assert await role.process.wait() == 2
    last = errors.decode().splitlines()[-1]
    assert f"rollout.multi_turn.tool_config_path: there is no file {tmp_path / 'absent.yaml'}; correct" in last


def test_an_unreadable_interactions_file_is_named_with_its_key(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "interactions.yaml"
    key = "rollout.multi_turn.interaction_config_path"
    job = job_with(tmp_path, tiny_model, {}, interaction_config_path=str(file))
    with pytest.raises(InvalidConfig, match=rf"{key}: there is no file .*interactions.yaml; correct the path"):
        ToolAgent(job)
    file.write_text("interaction: [")
    with pytest.raises(InvalidConfig, match=rf"{key}: .*interactions.yaml, line 1: "):
        ToolAgent(job)
