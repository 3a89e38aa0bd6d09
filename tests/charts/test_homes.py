"""A path in a home directory is refused: in a pod it would be /tmp, and lost. So is a run directory there."""

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


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"job": {"trainer": {"default_local_dir": "/tmp/run"}}}, "job.trainer.default_local_dir is /tmp/run"),
        ({"prepare": [{"creates": "../tmp/x", "command": ["a"]}]}, "prepare has a step that creates ../tmp/x"),
    ],
)
def test_what_is_written_to_a_pods_own_tmp_is_refused(values: dict[str, Any], named: str) -> None:
    """A pod of a reward, which prepares nothing, would also wait for it for ever."""
    assert refusal(values).startswith(f"{named}, but each pod has its own /tmp, which is lost with the pod")


def test_a_volume_in_tmp_is_none_of_the_pods_own() -> None:
    prepare = [{"creates": "/tmp/store/x", "command": ["a"]}]
    mount = {"name": "store", "mountPath": "/tmp/store"}
    volume = {"name": "store", "hostPath": {"path": "/store"}}
    objects({"prepare": prepare, "pods": {"volumeMounts": [mount], "volumes": [volume]}})


def test_a_tilde_elsewhere_stays() -> None:
    objects({"job": {"trainer": {"default_local_dir": "./~/a~"}, "rollout": {"stop": ["~"]}}})


def test_the_chart_knows_every_key_that_is_a_path() -> None:
    ends = ("path", "paths", "dir", "dirs", "file", "files")
    named = {
        key for key in leaves(JobConfig) if key.endswith(tuple(f"{sep}{end}" for sep in "._" for end in ends))
    }
    assert {*path_keys(JobConfig)} == named | {"plugins"}
