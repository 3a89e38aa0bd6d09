"""What the columns beside the prompt may hold, and how a run tells that they are other ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolemesh.config.data import DataConfig
from rolemesh.config.job import make_job
from rolemesh.data import PromptDataset
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
