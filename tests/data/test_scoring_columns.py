"""What the columns beside the prompt may hold, and how a run tells that they are other ones."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolemesh.catalog.datasets import DATASETS, DatasetSpec
from rolemesh.catalog.pages import PAGES
from rolemesh.config.data import DataConfig
from rolemesh.config.job import make_job
from rolemesh.config.reward import RewardConfig
from rolemesh.data import PromptDataset
from rolemesh.data.dataset import Agents
from rolemesh.data.parquet import write_rows
from rolemesh.errors import InvalidData
from rolemesh.models.tiny import byte_tokenizer
from rolemesh.services.controller.run.row_loading import training_data, validation_data, warn_of_unseen_rows

TOKENIZER = byte_tokenizer()
OWN_FUNCTION = {"reward": {"custom_reward_function": {"path": "/x.py"}}}
REWARD_MODEL = {"reward": {"reward_model": {"enable": True, "model": {"path": "scorer"}}}}
TALKS = {"agents": Agents("tool_agent")}
NEVER = {"test_freq": -1, "val_before_train": False}  # validate


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
    said = f"{name}, row 1: column 'reward_model' has no ground_truth that math's rule math can compare"
    with pytest.raises(InvalidData, match=said):
        dataset(file, reward=RewardConfig())
    assert len(dataset(file, reward=make_job(OWN_FUNCTION).reward)) == 2
    rows[1]["reward_model"] = {"style": "model"}
    assert len(dataset(written(tmp_path / name, rows), reward=make_job(REWARD_MODEL).reward)) == 2


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"data_source": "my/set"}, "column 'data_source': no rule for data_source 'my/set'; known are openai"),
        ({"data_source": "my/set", "reward_model": {}}, "column 'data_source': no rule for data_source"),
        ({"reward_model": {"style": "model"}}, "column 'reward_model' has style 'model', but reward.reward_mo"),
        *(
            (
                {"data_source": source, "reward_model": {"ground_truth": truth}},
                rf"column 'reward_model' has no ground_truth that {source}'s rule \w+ can compare .*{why}",
            )
            for source, truth, why in (
                ("math", {"target": []}, r"should be text, a number, .*it is \[\]"),
                ("math", [None], r"it is \[None\]"),
                ("math", {"target": None, "x": 1}, r"it is (None|{'x': 1})"),
                ("openai/gsm8k", "seven", "'seven' is not a number"),
                ("openai/gsm8k", ["7", "x"], r"\['7', 'x'\] is not a number"),
                ("openai/gsm8k", ["7", ""], r"without blank text; it is \['7', ''\]"),
                ("math", "", "without blank text; it is ''"),
                ("math_dapo", {"target": [" \n"]}, "without blank text; it is "),
                ("numina_cn_k12", " ", "without blank text; it is ' '"),
                ("math", True, "it is True"),
                ("apps", "7", "should hold inputs and outputs"),
                ("apps", {"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
                ("apps", '{"inputs": null, "outputs": ["1"]}', "should hold lists of inputs"),
                ("apps", {"inputs": ["1"], "outputs": ["no JSON"], "fn_name": "f"}, "Expecting value"),
                ("apps", "[" * 100_000, "nests too deeply"),
            )
        ),
    ],
)
def test_a_row_that_could_not_be_scored_is_refused_at_the_start(
    columns: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """By what scores: a user's function may read any row, but no row of `style: model` comes to it."""
    file = written(tmp_path / "a.jsonl", [row("a"), row("b", **columns)])
    with pytest.raises(InvalidData, match=rf"a\.jsonl, row 1: {said}"):
        dataset(file, reward=RewardConfig())
    own = make_job(OWN_FUNCTION).reward
    with pytest.raises(InvalidData, match="style 'model'") if "style" in said else nullcontext():
        dataset(file, reward=own)
    assert len(dataset(file)) == 2


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"reward_model": {"ground_truth": np.array(["1", "2"])}},
            "'reward_model' holds a numpy.ndarray; JSON",
        ),
        ({"reward_model": {"ground_truth": ["1", {"x": np.int64(1)}]}}, "'reward_model' holds a numpy.int64; "),
        (
            {"extra_info": {"made": date(2020, 1, 2)}},
            "'extra_info' holds a datetime.date; JSON takes dict, list",
        ),
        ({"reward_model": {"ground_truth": float("nan")}}, "'reward_model' has NaN as 'ground_truth'"),
        (
            {"extra_info": {"at": {(1, 2): 0.5}}},
            r"'extra_info' has the key \(1, 2\) \(tuple\); JSON keys are str",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "b", 1: 2}]}]},
            r"'prompt' has the key 1 \(int\)",
        ),
    ],
)
def test_a_cell_of_a_plug_in_that_no_message_can_hold_is_named(columns: dict[str, Any], said: str) -> None:
    def rows(files: Any, config: Any, split: str) -> list[dict[str, Any]]:
        return [row("a"), row("b", **columns)]

    with DATASETS.adding(DatasetSpec(name="own", code=rows)):
        config = DataConfig(dataset="own", max_prompt_length=64)
        with pytest.raises(InvalidData, match=f"^data set own, row 1: column {said}"):
            PromptDataset((), config, TOKENIZER, **TALKS)


@pytest.mark.parametrize("extra", ['{"index": 1}', [{"index": 1}], 0, "", [], False])
def test_extra_info_that_is_no_mapping_is_refused_at_the_start(extra: Any, tmp_path: Path) -> None:
    """By any job that scores: the contract of the reward has a mapping in this column."""
    file = written(tmp_path / "a.jsonl", [row("a"), row("b", extra_info=extra)])
    with pytest.raises(
        InvalidData, match=r"a\.jsonl, row 1: column 'extra_info' should hold a dict; it holds "
    ):
        dataset(file, reward=make_job(OWN_FUNCTION).reward)
    assert len(dataset(file, scored=False)) == 2


@pytest.mark.parametrize("source", ["openai/gsm8k", "math", "math_dapo"])
def test_verls_rules_refuse_a_blank_ground_truth(source: str, tmp_path: Path) -> None:
    """An empty answer would match it."""
    file = written(tmp_path / "a.jsonl", [row("a", data_source=source, reward_model={"ground_truth": ""})])
    with pytest.raises(InvalidData, match=r"row 0: column 'reward_model' .*without blank text; it is ''"):
        dataset(file, reward=RewardConfig(rules="verl"))


def test_verls_rule_of_gsm8k_compares_any_text(tmp_path: Path) -> None:
    truths: list[Any] = ["seven", "1,000", 7, {"target": ["7", 7.5]}]
    rows = [row("a", data_source="openai/gsm8k", reward_model={"ground_truth": truth}) for truth in truths]
    assert len(dataset(written(tmp_path / "a.jsonl", rows), reward=RewardConfig(rules="verl"))) == 4
    assert len(dataset(written(tmp_path / "b.jsonl", rows[1:]), reward=RewardConfig())) == 3


@pytest.mark.parametrize(
    ("trainer", "refused"),
    [
        ({}, ["train"]),
        ({"test_freq": 2}, ["train", "val"]),
        ({"val_before_train": True}, ["train", "val"]),
        ({"val_only": True}, ["val"]),
    ],
)
def test_only_rows_that_a_run_scores_must_be_scorable(
    trainer: dict[str, Any], refused: list[str], tmp_path: Path
) -> None:
    file = str(written(tmp_path / "a.jsonl", [row("a", data_source="my/set")]))
    data = {"train_files": [file], "val_files": [file], "train_batch_size": 1}
    trainer = {"total_training_steps": 1, **NEVER, **trainer}
    one = {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 1}
    job = make_job({"data": data, "actor": one, "critic": one, "trainer": trainer})
    for split, read in (("train", training_data), ("val", validation_data)):
        with pytest.raises(InvalidData, match="my/set") if split in refused else nullcontext():
            read(job, TOKENIZER, None)


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({}, "train: 3 of 7 rows are never seen: the number of steps is rounded down, to 1 of 4 rows"),
        ({"total_epochs": 2}, ""),  # 3 steps, and the last two rows of the second epoch were in the first
        ({"total_training_steps": 1}, ""),  # as asked for
        ({"val_only": True}, ""),
    ],
)
def test_rows_that_no_step_sees_are_said_at_start(
    trainer: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = str(written(tmp_path / "a.jsonl", [row("a")] * 7))
    one = {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 1}
    data = {"train_files": [file], "train_batch_size": 4}
    job = make_job({"data": data, "actor": one, "critic": one, "trainer": {**NEVER, **trainer}})
    warn_of_unseen_rows(job, len(training_data(job, TOKENIZER, None)[0]))
    assert said in caplog.text
    assert bool(said) == ("never seen" in caplog.text)


def test_a_plugin_dataset_needs_validation_rows_only_to_validate() -> None:
    def rows(files: Any, config: Any, split: str) -> list[dict[str, Any]]:
        return [row("a")] if split == "train" else []

    with DATASETS.adding(DatasetSpec(name="own", code=rows)):
        one = {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 1}
        sections = {"data": {"dataset": "own", "train_batch_size": 1}, "actor": one, "critic": one}
        job = make_job({**sections, "trainer": NEVER})
        assert len(training_data(job, TOKENIZER, None)[0]) == 1
        assert validation_data(job, TOKENIZER, None) is None
        job = make_job({**sections, "trainer": {**NEVER, "test_freq": 1}})
        with pytest.raises(
            InvalidData, match=r"no rows for split 'val'; or set trainer\.val_before_train to false"
        ):
            validation_data(job, TOKENIZER, None)


def test_a_page_of_a_plug_in_may_score_its_rows_by_itself(tmp_path: Path) -> None:
    """Whether it calls its reward is known from its code alone. Validation calls the reward all the same."""
    file = str(written(tmp_path / "a.jsonl", [row("a", data_source="my/set")]))
    one = {"ppo_mini_batch_size": 1, "ppo_micro_batch_size_per_gpu": 1}
    data = {"train_files": [file], "val_files": [file], "train_batch_size": 1}
    with PAGES.adding(replace(PAGES["grpo"], name="own", origin="own.py")):
        algorithm = {"page": "own", "adv_estimator": "rloo"}
        trainer = {"total_training_steps": 1, **NEVER, "test_freq": 2}
        sections = {"data": data, "actor": one, "algorithm": algorithm, "trainer": trainer}
        job = make_job({**sections, "rollout": {"n": 2}})
        rows, *_ = training_data(job, TOKENIZER, None)
        assert len(rows) == 1
        with pytest.raises(InvalidData, match="my/set"):
            validation_data(job, TOKENIZER, None)


@pytest.mark.parametrize("empty", [None, {}, {"split": None}])
def test_extra_info_without_values_is_as_if_it_were_absent(empty: Any, tmp_path: Path) -> None:
    rows = [row("a", extra_info={"split": "train"}), row("b", extra_info=empty)]
    batch = dataset(write_rows(tmp_path / "a.parquet", rows)).batch([0, 1])
    assert batch["extra_info"].tolist() == [{"split": "train"}, {}]


def test_rules_score_a_job_without_its_own_function_or_manager() -> None:
    assert make_job({}).reward.rules_score
    assert not make_job(OWN_FUNCTION).reward.rules_score


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
def test_what_affects_rewards_or_conversations_is_in_the_digest(
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
