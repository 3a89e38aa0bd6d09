"""What makes a batch's scores of a function's: reward managers, their options, and components as columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reward_rows import batch, custom, job, scores, working

from rolemesh.catalog.plugin_imports import forget
from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig, RewardFailed
from rolemesh.services.reward.worker import RewardWorker


async def test_the_batch_manager_calls_the_function_once_with_all_rows(
    tiny_model: Path, tmp_path: Path
) -> None:
    source = (
        "calls = 0\n"
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus):\n"
        "    global calls\n    calls += 1\n"
        "    assert data_sources == ['mine'] * 3 and ground_truths == [None] * 3\n"
        "    assert extra_infos[2] == {'index': 2}\n"
        "    return [{'score': len(text) + bonus, 'acc': calls} for text in solution_strs]\n"
    )
    config = custom(tmp_path, source)
    config["custom_reward_function"]["reward_kwargs"] = {"bonus": 0.5}
    async with working(tiny_model, reward_manager="batch", **config) as worker:
        answered = await worker.compute_scores(batch(*[("mine", "x" * n, None) for n in (3, 1, 2)]))
        assert answered["token_level_scores"].sum(1).tolist() == [3.5, 1.5, 2.5]
        assert answered["acc"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", ["numpy.float64", "bool", "object"])
async def test_a_batch_function_may_answer_with_an_array(tiny_model: Path, tmp_path: Path, dtype: str) -> None:
    source = (
        "import numpy\n"
        "def compute_score(solution_strs, **rows):\n"
        f"    return numpy.array([text == 'yes' for text in solution_strs], dtype={dtype})\n"
    )
    async with working(tiny_model, reward_manager="batch", **custom(tmp_path, source)) as worker:
        assert await scores(worker, "yes", "no", "yes") == [1.0, 0.0, 1.0]


async def test_a_batch_function_that_answers_for_fewer_rows_fails(tiny_model: Path, tmp_path: Path) -> None:
    function = custom(tmp_path, "def compute_score(**rows):\n    return [1.0]\n")
    async with working(tiny_model, reward_manager="batch", **function) as worker:
        with pytest.raises(RewardFailed, match=r"2 rows, train-000000 to train-000001: .*a list of 2 scores"):
            await scores(worker, "a", "b")


async def test_the_dapo_manager_punishes_the_score_and_not_acc(tiny_model: Path) -> None:
    """data.max_response_length is 24 and a token a character (and one for the end): 11 tokens are below the
    buffer of 12, 18 are in its middle, 24 at its end."""
    texts = [answer + " " * (length - 1 - len(answer)) for answer, length in
             (("Answer: 7", 11), ("Answer: 7", 18), ("Answer: 8", 24))]  # fmt: skip
    overlong = {"enable": True, "len": 12, "penalty_factor": 1.0, "log": True}
    async with working(tiny_model, reward_manager="dapo", overlong_buffer=overlong) as worker:
        answered = await worker.compute_scores(batch(*[("math_dapo", text, "7") for text in texts]))
    assert answered["token_level_scores"].sum(1).tolist() == [1.0, 0.5, -2.0]
    assert answered["acc"].tolist() == [1.0, 1.0, 0.0]
    assert list(answered["reward_extra_info"]) == [
        {"overlong_reward": 0.0, "overlong": 0.0, "pred": "7"},
        {"overlong_reward": -0.5, "overlong": 1.0, "pred": "7"},
        {"overlong_reward": -1.0, "overlong": 1.0, "pred": "8"},
    ]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"reward_manager": "batch"}, "custom_reward_function.path is not set"),
        ({"overlong_buffer": {"enable": True, "len": 4}}, "reward_manager naive.*reward_manager to dapo"),
        ({"reward_manager": "dapo", "overlong_buffer": {"enable": True}}, "overlong_buffer.len is 0"),
        (
            {"reward_manager": "dapo", "overlong_buffer": {"enable": True, "len": 600}},
            "reward.overlong_buffer.len is 600, but data.max_response_length is 512",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_refused(reward: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        make_job({"reward": reward})


async def test_a_plugin_manager_scores_in_other_processes_with_options(
    tiny_model: Path, tmp_path: Path
) -> None:
    """They import the plug-in and check its options again, so a path is a path and not JSON's text."""
    plugin = tmp_path / "scaled.py"
    plugin.write_text(
        "from pathlib import Path\nfrom rolemesh.plugins import Options, reward_manager\n"
        "class Scale(Options):\n    scale: float = 1.0\n    file: Path = Path('x')\n"
        "@reward_manager('scaled', options=Scale)\n"
        "def scaled(compute_score, rows, *, scale, file):\n"
        "    assert file.name == 'y'\n"
        "    return [scale * compute_score(**row)['score'] for row in rows]\n"
    )
    reward = {"reward_manager": "scaled", "options": {"scale": 1.5, "file": "x/y"}}
    sections = {**job(tiny_model).model_dump(), "plugins": [str(plugin)], "reward": reward}
    worker = RewardWorker(make_job(sections))
    try:
        rows = batch(("openai/gsm8k", "#### 7", "7"), ("openai/gsm8k", "8", "7"))
        answered = await worker.compute_scores(rows)
    finally:
        worker.close()
        forget(str(plugin))
    assert answered["token_level_scores"].sum(1).tolist() == [1.5, 0.0]


def with_components(model: Path, function: dict[str, Any]) -> RewardWorker:
    config = job(model, **function)
    algorithm = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["format", "right"]}
    return RewardWorker(make_job({**config.model_dump(), "algorithm": algorithm, "rollout": {"n": 2}}))


async def test_components_are_columns_in_the_order_of_the_keys(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "def compute_score(extra_info, **row):\n"
        "    return {'score': 1, 'right': extra_info['index'], 'format': -2}\n"
    )
    worker = with_components(tiny_model, custom(tmp_path, source))
    answered = await worker.compute_scores(batch(("mine", "x", None), ("mine", "y", None)))
    worker.close()
    assert answered["reward_components"].tolist() == [[-2.0, 0.0], [-2.0, 1.0]]
    assert answered["reward_extra_info"][1] == {"right": 1.0, "format": -2.0}


async def test_a_component_that_is_not_there_names_the_row(tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "def compute_score(extra_info, **row):\n"
        "    return {'score': 1, 'format': 1, **({'right': 1} if extra_info['index'] == 0 else {})}\n"
    )
    worker = with_components(tiny_model, custom(tmp_path, source))
    with pytest.raises(RewardFailed, match=r"row train-000001: .*gdpo_reward_keys names 'right'"):
        await worker.compute_scores(batch(("mine", "x", None), ("mine", "y", None)))
    worker.close()
