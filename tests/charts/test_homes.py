"""A path in a home directory is refused: in a pod it would be /tmp, and lost with the pod."""

from __future__ import annotations

from typing import Any

import pytest
from rendering import objects, refusal

from rolemesh.config import JobConfig
from rolemesh.config.base import leaves, path_keys


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"job": {"trainer": {"default_local_dir": "~/ckpt"}}}, "job.trainer.default_local_dir is ~/ckpt"),
        ({"job": {"actor": {"model": {"path": "~other/qwen"}}}}, "job.actor.model.path is ~other/qwen"),
        (
            {"job": {"data": {"train_files": ["a.parquet", "~/b.parquet"]}}},
            "job.data.train_files is ~/b.parquet",
        ),
        ({"job": {"data": {"val_files": "~/b.parquet"}}}, "job.data.val_files is ~/b.parquet"),
        ({"job": {"plugins": ["~/losses.py"]}}, "job.plugins is ~/losses.py"),
        (
            {"job": {"reward": {"custom_reward_function": {"path": "~/reward.py"}}}},
            "job.reward.custom_reward_function.path is ~/reward.py",
        ),
        ({"prepare": [{"creates": "~/data", "command": ["a"]}]}, "prepare has a step that creates ~/data"),
    ],
)
def test_a_path_in_a_home_directory_is_refused(values: dict[str, Any], named: str) -> None:
    assert refusal(values).startswith(f"{named}, but ~ in a pod is /tmp, which is lost with the pod: write")


def test_a_tilde_elsewhere_stays() -> None:
    objects({"job": {"trainer": {"default_local_dir": "./~/a~"}, "rollout": {"stop": ["~"]}}})


def test_the_chart_knows_every_key_that_is_a_path() -> None:
    ends = ("path", "paths", "dir", "dirs", "file", "files")
    named = {
        key for key in leaves(JobConfig) if key.endswith(tuple(f"{sep}{end}" for sep in "._" for end in ends))
    }
    assert {*path_keys(JobConfig)} == named | {"plugins"}
