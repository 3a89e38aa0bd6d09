"""What the columns beside the prompt may hold, and how a run tells that they are other ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolemesh.config.data import DataConfig
from rolemesh.config.job import make_job
from rolemesh.data import PromptDataset
from rolemesh.data.dataset import Agents
from rolemesh.data.parquet import write_rows
from rolemesh.errors import InvalidData
from rolemesh.models.tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()


def row(content: str, **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "math",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "extra_info": {"index": 1},
        **columns,
    }


def written(file: Path, rows: list[dict[str, Any]]) -> Path:
    if file.suffix == ".parquet":
        return write_rows(file, rows)
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def dataset(file: Path, **arguments: Any) -> PromptDataset:
    return PromptDataset([file], DataConfig(max_prompt_length=64), TOKENIZER, **arguments)


# Parquet gives the other row's keys to {} and to {"style": None}: both are a struct of nulls.
@pytest.mark.parametrize(
    "empty", [None, {}, {"style": None}, {"style": "rule", "ground_truth": {"target": None}}]
)
@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_only_a_rule_needs_a_ground_truth(name: str, empty: dict[str, Any] | None, tmp_path: Path) -> None:
    """A user's function may find it elsewhere, here in extra_info. A reward model needs none."""
    full = {"style": "rule", "ground_truth": {"target": "1"}}
    rows = [row("a", reward_model=full), row("b", reward_model=empty, extra_info={"answer": "2"})]
    file = written(tmp_path / name, rows)
    batch = dataset(file).batch([0, 1])
    assert batch["reward_model"][0] == full
    assert not (batch["reward_model"][1].get("ground_truth") or {}).get("target")
    assert batch["extra_info"][1] == {"answer": "2"}
    said = f"{name}, row 1: column 'reward_model' has no ground_truth, with which the rule of math compares"
    with pytest.raises(InvalidData, match=said):
        dataset(file, by_rules=True)
    rows[1]["reward_model"] = {"style": "model"}
    assert len(dataset(written(tmp_path / name, rows), by_rules=True)) == 2


@pytest.mark.parametrize("empty", [None, {}, {"split": None}])
def test_extra_info_without_values_is_as_if_it_were_absent(empty: Any, tmp_path: Path) -> None:
    rows = [row("a", extra_info={"split": "train"}), row("b", extra_info=empty)]
    batch = dataset(write_rows(tmp_path / "a.parquet", rows)).batch([0, 1])
    assert batch["extra_info"].tolist() == [{"split": "train"}, {}]


def test_rules_score_a_job_that_brings_neither_function_nor_manager() -> None:
    assert make_job({}).reward.rules_score
    assert not make_job({"reward": {"custom_reward_function": {"path": "/x.py"}}}).reward.rules_score


TALKS = {"agents": Agents("tool_agent")}


@pytest.mark.parametrize(
    ("columns", "talks"),
    [
        ({"reward_model": {"style": "rule", "ground_truth": "2"}}, False),
        ({"reward_model": {"style": "rule", "ground_truth": 1.0}}, False),
        ({"data_source": "math_dapo"}, False),
        ({"extra_info": {"index": 2}}, False),
        ({"extra_info": {"index": 1, "tools_kwargs": {"f": {"create_kwargs": {"x": 0}}}}}, True),
        ({"agent_name": "react_agent"}, True),
        ({"prompt": [{"role": "user", "content": "b", "name": "Bo"}]}, True),  # the template does not write it
    ],
)
def test_what_can_change_a_reward_or_a_conversation_changes_the_digest(
    columns: dict[str, Any], talks: bool, tmp_path: Path
) -> None:
    """While the prompts' tokens, of which earlier versions kept the digest, stay the same."""
    arguments = TALKS if talks else {}
    one, other = (
        dataset(written(tmp_path / f"{number}.jsonl", [row("a"), row("b", **edited)]), **arguments)
        for number, edited in enumerate(({}, columns))
    )
    assert one.digest == other.digest
    assert one.columns_digest != other.columns_digest


def test_a_value_that_moves_to_another_row_changes_the_digest(tmp_path: Path) -> None:
    digests = set()
    for number, truths in enumerate((("1", "2"), ("2", "1"))):
        rows = [
            row(content, reward_model={"ground_truth": truth})
            for content, truth in zip("ab", truths, strict=True)
        ]
        digests.add(dataset(written(tmp_path / f"{number}.jsonl", rows)).columns_digest)
    assert len(digests) == 2


def test_what_a_run_does_not_read_leaves_the_digest_alone(tmp_path: Path) -> None:
    """As do the kind of file, the order of keys, and keys that Arrow adds because other rows have them."""
    extras = [{"index": 1, "more": {"a": 1}}, {"more": {"b": 2}, "split": "train"}]
    turned = [{key: extra[key] for key in reversed(extra)} for extra in extras]
    files = [
        written(tmp_path / "a.jsonl", [row("a", extra_info=extras[0]), row("b", extra_info=extras[1])]),
        written(tmp_path / "b.jsonl", [row("a", extra_info=turned[0]), row("b", extra_info=turned[1])]),
        written(tmp_path / "c.parquet", [row("a", extra_info=extras[0]), row("b", extra_info=extras[1])]),
        written(
            tmp_path / "d.jsonl", [row("a", extra_info=extras[0], ability="x"), row("b", extra_info=extras[1])]
        ),
    ]
    assert len({dataset(file).columns_digest for file in files}) == 1
    speaks = [{"role": "user", "content": "b", "name": "Bo"}]  # without a conversation only tokens are read
    named = [row("a", extra_info=extras[0]), row("b", extra_info=extras[1], prompt=speaks)]
    assert dataset(written(tmp_path / "e.jsonl", named)).columns_digest == dataset(files[0]).columns_digest
