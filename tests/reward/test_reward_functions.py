"""The rules, by hand-written answers."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rolemesh.config.reward import CustomRewardConfig, RewardConfig
from rolemesh.data.converters.gsm8k_dataset import gsm8k_rows
from rolemesh.errors import InvalidConfig
from rolemesh.rules import gsm8k
from rolemesh.rules.notation import brace_fractions
from rolemesh.rules.sources import UnknownDataSource
from rolemesh.services.reward.functions import default_compute_score, math
from rolemesh.services.reward.functions.custom import load_function
from rolemesh.services.reward.scoring_pool import first_message
from rolemesh.services.reward.scoring_process import scorer_in, scorer_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gsm8k" / "train.jsonl"

# -------------------------------------------------------------------------------------- gsm8k


@pytest.mark.parametrize(
    ("response", "score", "pred"),
    [
        ("#### 1234", 1.0, "1234"),
        ("#### $1,234.00 it is", 1.0, "1234"),
        ("#### 1234.\n#### done", 1.0, "1234"),
        ("#### 0.50", 0.1, "0.5"),  # well formed, and wrong
        *((f"#### 1234\n{taken_back}", 0.1, "") for taken_back in ("#### ,", "#### 1.2.3", "####,.", "#### .")),
        *((nothing, 0.0, "") for nothing in ("", "it is 1234", "# 1234", "#### one", "####", "#### -")),
    ],
)
def test_gsm8k_scores_the_last_marked_number_and_spells_it_in_one_way(
    response: str, score: float, pred: str
) -> None:
    for truth in ("1234", ["1", "1234"], {"target": 1234}, {"target": ["1", "1234"]}, 1234.0):
        scored = gsm8k.compute_score(response, truth, format_score=0.1)
        assert scored == {"score": score, "acc": float(score == 1), "pred": pred}


@pytest.mark.parametrize(
    ("data_source", "answer"),
    [("openai/gsm8k", "#### 5"), ("math_dapo", "Answer: 5"), ("aime24", r"\boxed{5}")],
)
def test_an_answer_counts_within_the_last_300_or_set_characters(data_source: str, answer: str) -> None:
    """As in verl, whose tail is of 300: rambling after an early answer is not rewarded."""
    for answer_chars, most in ((None, 10_000), (300, 300), (20, 20)):
        config = RewardConfig() if answer_chars == 300 else RewardConfig(answer_chars=answer_chars)
        for num_after in (most - len(answer), most - len(answer) + 1):
            scored = default_compute_score(data_source, answer + "\n" * num_after, "5", config=config)
            assert isinstance(scored, dict)
            assert scored["acc"] == float(answer_chars is None or num_after + len(answer) <= most)


def test_every_solution_of_the_data_set_is_right_by_its_own_rule() -> None:
    for row in gsm8k_rows(FIXTURE):
        result = default_compute_score(
            row["data_source"], row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        )
        assert result.items() >= {"score": 1.0, "acc": 1.0}.items()


def test_fractions_of_any_number_and_depth_are_read() -> None:
    assert brace_fractions(r"\frac12" * 5000) == r"\frac{1}{2}" * 5000
    assert brace_fractions(r"\frac{" * 5000 + "0" + "}2" * 5000) == r"\frac{" * 5000 + "0" + "}{2}" * 5000


@pytest.mark.parametrize("rule", ["openai/gsm8k", "math", "math_dapo"])
def test_an_error_does_not_repeat_a_long_ground_truth(rule: str) -> None:
    for truth in ({"x": "y" * 10_000}, ["one" * 10_000, None]):
        with pytest.raises(ValueError, match="ground_truth should be") as raised:
            default_compute_score(rule, "1", truth)
        assert len(str(raised.value)) < 400
    with pytest.raises(ValueError, match="is not a number") as raised:
        gsm8k.compute_score("#### 1", "one" * 10_000)
    assert len(str(raised.value)) < 400


def test_math_scores_the_box_and_nothing_else() -> None:
    assert math.compute_score(r"thus \frac{3}{4}", r"\frac{3}{4}") == 0.0
    assert math.compute_score(r"\boxed{B}", ["A", "B"]) == 1.0


# ----------------------------------------------------------------------------- by data_source


def test_an_unknown_data_source_error_names_known_ones_and_a_fix() -> None:
    with pytest.raises(UnknownDataSource, match=r"'my/set'.*openai/gsm8k.*custom_reward_function"):
        default_compute_score("my/set", "1", "1")


@pytest.mark.parametrize(
    "truth", [None, {}, [], {"inputs": []}, [None], [1, float("nan")], "", " \n", ["1", ""], True]
)
def test_a_ground_truth_of_no_known_form_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground_truth should be"):
        default_compute_score("math", r"\boxed{1}", truth)


# ------------------------------------------------------------------------------------- custom


def test_a_users_function_gets_the_row_and_its_keywords(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Bonus:\n    value: float\n"
        "def judge(data_source, solution_str, ground_truth, extra_info, bonus=0):\n"
        "    return len(solution_str) + Bonus(bonus).value + extra_info['index']\n"
    )
    function = load_function(CustomRewardConfig(path=str(file), name="judge", reward_kwargs={"bonus": 0.5}))
    assert function(data_source="x", solution_str="abc", ground_truth=None, extra_info={"index": 10}) == 13.5


def test_a_function_is_that_of_the_file_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for score in (1, 2):
        file.write_text(f"def compute_score(**row): return {score}")
        os.utime(file, (0, 0))  # as after an edit in the same second
        assert load_function(CustomRewardConfig(path=str(file)))() == score


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "no such file"),
        ("raise KeyError('key')", "raised KeyError: 'key'"),
        ("import no_such_package", "raised ModuleNotFoundError"),
        ("def compute_scores(): ...", r"no function 'compute_score'; it has \['compute_scores'\]"),
        ("compute_score = 1", "no function 'compute_score'"),
        ("def (", "raised SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_at_start(
    tmp_path: Path, source: str | None, message: str
) -> None:
    file = tmp_path / "mine.py"
    if source is not None:
        file.write_text(source)
    with pytest.raises(InvalidConfig, match=message) as raised:
        load_function(CustomRewardConfig(path=str(file)))
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    ("manager", "function", "kwargs", "said"),
    [
        ("naive", "solution_str, ground_truth", {}, "got an unexpected keyword argument 'data_source'"),
        ("batch", "data_source, solution_str, ground_truth, extra_info", {}, "missing .* 'data_source'"),
        ("dapo", "data_sources, solution_strs, ground_truths, extra_infos", {}, "missing .* 'data_sources'"),
        (
            "naive",
            "solution_str, form=0, *, data_source, ground_truth, extra_info",
            {"frm": 1},
            "argument 'frm'",
        ),
        ("naive", "**row", {"solution_str": "x"}, "multiple values for keyword argument 'solution_str'"),
        ("naive", "scale, **row", {}, "missing a required .*'scale'"),
        ("naive", "scale, **row", {"scale": 2}, None),
        ("batch", "solution_strs, **rows", {}, None),
    ],
)
def test_a_function_must_take_the_arguments_that_it_will_get(
    manager: str, function: str, kwargs: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def compute_score({function}): return 1.0\n")
    custom = {"path": str(file), "reward_kwargs": kwargs}
    config = RewardConfig(reward_manager=manager, custom_reward_function=custom)
    named = rf"^reward\.custom_reward_function: compute_score of {file} should take .*{said}"
    makers: list[Any] = [scorer_of, lambda config: scorer_in(first_message(config, ()))]
    for make in makers:
        with pytest.raises(InvalidConfig, match=named) if said else nullcontext():
            make(config)


def test_a_decorator_may_adapt_a_function_of_other_arguments(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from functools import wraps\n"
        "def adapted(function):\n"
        "    @wraps(function)\n"
        "    def called(solution_str, ground_truth, **row): return function(solution_str, ground_truth)\n"
        "    return called\n"
        "@adapted\n"
        "def compute_score(response, truth): return response == truth\n"
    )
    scorer = scorer_of(RewardConfig(custom_reward_function={"path": str(file)}))
    row = {"data_source": "x", "solution_str": "a", "ground_truth": "a", "extra_info": {}}
    assert [score.score for score in scorer.score([row])] == [1.0]
