"""A path in a home directory is refused: in a pod it would be /tmp, and lost. So is a run directory there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rendering import notes, objects, pods, refusal

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


STORE: dict[str, Any] = {
    "volumeMounts": [{"name": "store", "mountPath": path} for path in ("/tmp/store", "/caches/store")],
    "volumes": [{"name": "store", "hostPath": {"path": "/store"}}],
}
SCRATCH = {
    "volumeMounts": [{"name": "fast", "mountPath": "/fast"}],
    "volumes": [{"name": "fast", "emptyDir": {}}],
}
IN_STORE = {"trainer": {"default_local_dir": "/tmp/store/run"}}
IN_CACHES = {"trainer": {"default_local_dir": "/caches/store/run"}}
PREPARED = [{"creates": "/tmp/store/x", "command": ["a"]}]
DIR, LOST = "job.trainer.default_local_dir is", "which is lost with the pod"
RUN = "the run directory (job.trainer.default_local_dir) is"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"job": {"trainer": {"default_local_dir": "/tmp/run"}}},
            f"{DIR} /tmp/run, but pods of the controller have their own /tmp, {LOST}",
        ),
        (
            {"job": {"trainer": {"default_local_dir": "/fast/run"}}, "pods": SCRATCH},
            f"{DIR} /fast/run, but pods of the controller have their own /fast, {LOST}",
        ),
        (
            {"job": IN_STORE, "groups": {"actor": STORE, "critic": STORE}},
            f"{DIR} /tmp/store/run, but pods of the controller have their own /tmp, {LOST}",
        ),
        (
            {"job": IN_STORE, "controller": STORE, "groups": {"critic": STORE}},
            f"{DIR} /tmp/store/run, but pods of group actor have their own /tmp, {LOST}",
        ),
        (
            {"job": IN_CACHES, "controller": STORE, "groups": {"critic": STORE}},
            f"{RUN} /caches/store/run, and pods of the controller, group critic have a volume there, but those "
            "of group actor, which write it too, have none",
        ),
        (
            {
                "job": {"trainer": IN_CACHES["trainer"] | {"profile_steps": [2]}},
                "controller": STORE,
                "groups": {"actor": STORE, "critic": STORE},
            },
            f"{RUN} /caches/store/run, and pods of the controller, group actor, group critic have a volume "
            "there, but those of group reward, group rollout, which",
        ),
        (
            {"job": IN_CACHES, "controller": STORE, "storage": {"caches": {"size": "1Gi"}}},
            f"{RUN} /caches/store/run, but only pods that compile for GPUs mount storage.caches",
        ),
        (
            {"prepare": PREPARED, "controller": STORE, "groups": {"actor": STORE}},
            "prepare has a step that creates /tmp/store/x, but each pod has its own /tmp, and pods of group "
            "reward, which prepare nothing",
        ),
        (
            {"prepare": PREPARED, "groups": {"reward": STORE}},
            "prepare has a step that creates /tmp/store/x, but pods of group reward, which prepare nothing, "
            "would wait for it for ever: they have a volume there",
        ),
        (
            {
                "pods": {
                    "volumeMounts": [{"name": "fast", "mountPath": "/workspace/outputs"}],
                    "volumes": SCRATCH["volumes"],
                }
            },
            f"{DIR} /workspace/outputs/run, but pods of the controller have their own /workspace/outputs, "
            f"{LOST}",
        ),
        (
            {"prepare": [{"creates": "/caches/x", "command": ["a"]}], "storage": {"caches": {"size": "1Gi"}}},
            "prepare has a step that creates /caches/x, but only pods that compile for GPUs mount storage.",
        ),
    ],
)
def test_what_is_written_where_no_other_pod_finds_it_is_refused(values: dict[str, Any], said: str) -> None:
    """A volume in the pods of some groups is none in those of the others."""
    assert refusal(values).startswith(said)


def test_each_pod_makes_its_own_copy_in_tmp_where_all_pods_prepare() -> None:
    prepare = [{"creates": "/tmp/qwen", "command": ["cp", "-r", "/models/qwen", "/tmp/qwen"]}]
    for pod in pods(objects({"prepare": prepare, "placement": {"strategy": "collocate"}})):
        [step] = pod["spec"]["initContainers"]
        assert step["command"][0] == "flock"
        assert {"name": "tmp", "mountPath": "/tmp"} in step["volumeMounts"]


def test_a_volume_in_tmp_is_none_of_the_pods_own() -> None:
    """The pods that write the run directory mount it, and so do those that wait for what is prepared. Nor is a
    volume in storage.caches one of the caches."""
    groups = dict.fromkeys(("actor", "critic", "reward"), STORE)
    objects({"prepare": PREPARED, "controller": STORE, "groups": groups, "job": IN_STORE})
    caches = {"caches": {"size": "1Gi"}}
    every = {"pods": STORE, "prepare": [{"creates": "/caches/store/x", "command": ["a"]}]}
    objects(every | {"job": IN_CACHES, "storage": caches})


NO_CLAIM = "NO CLAIM HAS THIS FOLDER"
KEPT, DELETED = "helm uninstall keeps this claim", "helm uninstall deletes this claim with the trained model"


@pytest.mark.parametrize(
    ("path", "storage", "said"),
    [
        ("/data/a", {}, NO_CLAIM),
        ("a", {"checkpoints": {"size": "1Ti", "keep": False}}, f"in claim demo-workspace. {KEPT}"),
        (
            "../checkpoints/a",
            {"checkpoints": {"size": "1Ti", "keep": False}},
            f"in claim demo-checkpoints. {DELETED} (storage.checkpoints.keep)",
        ),
        ("a", {"checkpoints": {"existingClaim": "mine", "mountPath": "/workspace/a"}}, "in claim mine.\n"),
    ],
)
def test_the_notes_say_which_claim_has_the_run_directory_and_whether_it_is_kept(
    path: str, storage: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """One in no claim is not refused, as something that the chart does not know may mount a volume there. The
    notes also say what an uninstalled run loses."""
    trainer = {"default_local_dir": path, "save_freq": 20}
    text = notes({"job": {"trainer": trainer}, "storage": storage}, tmp_path)
    assert f"It writes to {path}" in text
    assert "stop it before you uninstall it, or it loses" in text
    assert "(each 20 steps)" in text
    assert said in text
    for words in (NO_CLAIM, KEPT, DELETED):
        assert (words in text) == (words in said)


def test_a_tilde_elsewhere_stays() -> None:
    objects({"job": {"trainer": {"default_local_dir": "./~/a~"}, "rollout": {"stop": ["~"]}}})


def test_the_chart_knows_every_key_that_is_a_path() -> None:
    ends = ("path", "paths", "dir", "dirs", "file", "files")
    named = {
        key for key in leaves(JobConfig) if key.endswith(tuple(f"{sep}{end}" for sep in "._" for end in ends))
    }
    assert {*path_keys(JobConfig)} == named | {"plugins"}
