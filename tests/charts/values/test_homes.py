"""A path in a home directory is refused: in a pod it would be /tmp, and lost. So is what a run writes where
no other pod finds it, or where the pod cannot write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rendering import notes, objects, pods, refusal, refusals

from rolemesh.config import JobConfig
from rolemesh.config.base import leaves, path_keys


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"job": {"trainer": {"default_local_dir": "~/ckpt"}}}, "job.trainer.default_local_dir"),
        ({"job": {"actor": {"model": {"path": "~other/qwen"}}}}, "job.actor.model.path"),
        ({"job": {"data": {"train_files": ["a.parquet", "~/b.parquet"]}}}, "job.data.train_files.1"),
        ({"job": {"data": {"val_files": "~/b.parquet"}}}, "job.data.val_files"),
        ({"job": {"plugins": ["~/losses.py"]}}, "job.plugins.0"),
        (
            {"job": {"reward": {"custom_reward_function": {"path": "~/reward.py"}}}},
            "job.reward.custom_reward_function.path",
        ),
        ({"prepare": [{"creates": "~/data", "command": ["a"]}]}, "prepare.0.creates"),
    ],
)
def test_a_path_in_a_home_directory_is_refused(values: dict[str, Any], named: str) -> None:
    [said] = refusals(values)
    assert said.startswith(
        f"{named}: a path without ~, which in a pod is /tmp and is lost with it: write a path in"
    )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prepare": [{"creates": "$(DIR)/x", "command": ["a"]}]}, "prepare.0.creates"),
        ({"job": {"data": {"val_files": ["a", "/data/$(B)"]}}}, "job.data.val_files.1"),
    ],
)
def test_a_path_with_a_variable_of_the_kubelet_is_refused(values: dict[str, Any], named: str) -> None:
    """The kubelet replaces $(NAME) in arguments alone, after the chart has looked for the path's volume."""
    [said] = refusals(values)
    assert said.startswith(
        f"{named}: a path without $(NAME), which the chart does not know: write a path in a claim"
    )


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
LOST = "which no other pod sees, and which is lost with the pod: write"
RUN = "the run directory (job.trainer.default_local_dir) is"
APART = "but the pods that write it do not share a volume there"


def mounted(at: str, mount: dict[str, Any], **source: Any) -> dict[str, Any]:
    """Settings of pods that mount one volume."""
    return {
        "volumes": [{"name": "fast", **source}],
        "volumeMounts": [{"name": "fast", "mountPath": at, **mount}],
    }


def generated_by_servers(weights_dir: str) -> dict[str, Any]:
    """A job whose rollout writes weights for other servers."""
    return {"rollout": {"name": "openai", "openai": {"urls": ["http://a:1"], "weights_dir": weights_dir}}}


# Of b, whose roles take turns, on CPUs each offloads its weights to the run directory.
TURNS: dict[str, Any] = {
    "placement": {
        "strategy": "custom",
        "groups": {"a": ["actor"], "b": ["rollout", "reference"], "c": ["reward"]},
    },
    "job": IN_CACHES
    | {"algorithm": {"adv_estimator": "grpo"}, "actor": {"use_kl_loss": True}, "rollout": {"n": 2}},
    "controller": STORE,
    "groups": {"a": STORE},
}
ON_CPU = {"image": {"kind": "cpu"}, "roles": {role: {"gpus": 0} for role in ("actor", "rollout", "reference")}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"job": {"trainer": {"default_local_dir": "/tmp/run"}}},
            f"{RUN} /tmp/run, but pods of the controller have their own /tmp, {LOST}",
        ),
        (
            {"job": {"trainer": {"default_local_dir": "/fast/run"}}, "pods": SCRATCH},
            f"{RUN} /fast/run, but pods of the controller have their own /fast, {LOST}",
        ),
        (
            {"job": IN_STORE, "groups": {"actor": STORE, "critic": STORE}},
            f"{RUN} /tmp/store/run, but pods of the controller have their own /tmp, {LOST}",
        ),
        (
            {"job": IN_STORE, "controller": STORE, "groups": {"critic": STORE}},
            f"{RUN} /tmp/store/run, but pods of group actor have their own /tmp, {LOST}",
        ),
        (
            {"job": IN_CACHES, "controller": STORE, "groups": {"critic": STORE}},
            f"{RUN} /caches/store/run, {APART} (a volume of yours: the controller, group critic; no "
            "volume: group actor): mount one in all of them (volumes and volumeMounts), or write a",
        ),
        (
            {
                "job": {"trainer": IN_CACHES["trainer"] | {"profile_steps": [2]}},
                "controller": STORE,
                "groups": {"actor": STORE, "critic": STORE},
            },
            f"{RUN} /caches/store/run, {APART} (a volume of yours: the controller, group actor, group critic; "
            "no volume: group reward, group rollout)",
        ),
        (
            TURNS | ON_CPU,
            f"{RUN} /caches/store/run, {APART} (a volume of yours: the controller, group a; no volume: "
            "group b)",
        ),
        (
            {"groups": {"actor": mounted("/workspace/outputs", {}, hostPath={"path": "/x"})}},
            f"{RUN} /workspace/outputs/run, {APART} (a volume of yours: group actor; claim demo-workspace at "
            "/outputs/run: the controller, group critic)",
        ),
        (
            {"job": IN_CACHES, "controller": STORE, "storage": {"caches": {"size": "1Gi"}}},
            f"{RUN} /caches/store/run, but only pods that compile for GPUs mount storage.caches",
        ),
        (
            {"prepare": PREPARED, "controller": STORE, "groups": {"actor": STORE}},
            "prepare has a step that creates /tmp/store/x, but pods of group reward, which prepare nothing, "
            "would wait for it for ever: they look for it in their own /tmp, and the pods that prepare make it "
            "in a volume of yours, or in their own /tmp: write a path in a claim",
        ),
        (
            {"prepare": PREPARED, "groups": {"reward": STORE}},
            "prepare has a step that creates /tmp/store/x, but pods of group reward, which prepare nothing, "
            "would wait for it for ever: they look for it in a volume of yours, and the pods that prepare make "
            "it in their own /tmp: write",
        ),
        (
            {
                "prepare": [{"creates": "data/x", "command": ["a"]}],
                "groups": {"reward": mounted("/workspace/data", {}, hostPath={"path": "/x"})},
            },
            "prepare has a step that creates data/x, but pods of group reward, which prepare nothing, would "
            "wait for it for ever: they look for it in a volume of yours, and the pods that prepare make it in "
            "claim demo-workspace at /data/x: write",
        ),
        (
            {"job": {"trainer": {"rollout_data_dir": "/tmp/d"}}},
            f"job.trainer.rollout_data_dir is /tmp/d, but pods of the controller have their own /tmp, {LOST}",
        ),
        (  # the API server makes a volume without a source an emptyDir
            {"job": {"trainer": {"validation_data_dir": "/fast/d"}}, "controller": mounted("/fast", {})},
            "job.trainer.validation_data_dir is /fast/d, but pods of the controller have their own /fast, "
            f"{LOST}",
        ),
        (
            {"job": generated_by_servers("/tmp/w")},
            f"job.rollout.openai.weights_dir is /tmp/w, but pods of group rollout have their own /tmp, {LOST}",
        ),
        (
            {
                "pods": {
                    "volumeMounts": [{"name": "fast", "mountPath": "/workspace/outputs"}],
                    "volumes": SCRATCH["volumes"],
                }
            },
            f"{RUN} /workspace/outputs/run, but pods of the controller have their own /workspace/outputs, "
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


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"groups": {"actor": mounted("/workspace/outputs", {"readOnly": True}, hostPath={"path": "/x"})}},
            f"{RUN} /workspace/outputs/run, but the volume that pods of group actor have at /workspace/outputs "
            "is read-only: mount one there that they can write to, or write a path in a claim",
        ),
        (
            {
                "job": {"trainer": {"rollout_data_dir": "/fast/d"}},
                "controller": mounted("/fast", {}, configMap={"name": "a"}),
            },
            "job.trainer.rollout_data_dir is /fast/d, but the volume that pods of the controller have at /fast",
        ),
        (
            {
                "job": {"trainer": {"validation_data_dir": "/fast/d"}},
                "controller": mounted("/fast", {}, persistentVolumeClaim={"claimName": "a", "readOnly": True}),
            },
            "job.trainer.validation_data_dir is /fast/d, but the volume that pods of the controller have at",
        ),
        (
            {"job": generated_by_servers("/models/w"), "storage": {"models": {"existingClaim": "mine"}}},
            "job.rollout.openai.weights_dir is /models/w, but storage.models is read-only: set storage.models.",
        ),
        (
            {"prepare": [{"creates": "/models/x", "command": ["a"]}], "storage": {"models": {"size": "1Gi"}}},
            "prepare has a step that creates /models/x, but storage.models, which the chart makes empty, is "
            "read-only: set storage.models.readOnly to false, write to another claim, or leave the step out if",
        ),
    ],
)
def test_what_is_written_where_the_pod_cannot_write_is_refused(values: dict[str, Any], said: str) -> None:
    """A claim of yours may have what a step creates there already."""
    assert refusal(values).startswith(said)


def test_each_pod_makes_its_own_copy_in_tmp_if_all_pods_prepare() -> None:
    prepare = [{"creates": "/tmp/qwen", "command": ["cp", "-r", "/models/qwen", "/tmp/qwen"]}]
    for pod in pods(objects({"prepare": prepare, "placement": {"strategy": "collocate"}})):
        [step] = pod["spec"]["initContainers"]
        assert step["command"] == ["rolemesh", "prepare"]
        assert {"name": "tmp", "mountPath": "/tmp"} in step["volumeMounts"]


def test_a_volume_in_tmp_is_none_of_the_pods_own() -> None:
    """The pods that write the run directory mount it, and so do those that wait for what is prepared. Nor is a
    volume in storage.caches one of the caches."""
    groups = dict.fromkeys(("actor", "critic", "reward"), STORE)
    objects({"prepare": PREPARED, "controller": STORE, "groups": groups, "job": IN_STORE})
    caches = {"caches": {"size": "1Gi"}}
    every = {"pods": STORE, "prepare": [{"creates": "/caches/store/x", "command": ["a"]}]}
    objects(every | {"job": IN_CACHES, "storage": caches})


def test_pods_may_mount_the_run_directorys_claim_a_second_time() -> None:
    again = {"name": "workspace", "mountPath": "/workspace/outputs", "subPath": "outputs"}
    claim = {"persistentVolumeClaim": {"claimName": "demo-workspace"}}
    actor = mounted("/workspace/outputs", {"subPath": "outputs"}, **claim)
    objects({"controller": {"volumeMounts": [again]}, "groups": {"actor": actor}})


def test_another_folder_of_the_run_directory_claim_is_not_shared() -> None:
    other = {"volumeMounts": [{"name": "workspace", "mountPath": "/workspace/outputs", "subPath": "other"}]}
    assert APART in refusal({"groups": {"actor": other}})


def test_roles_that_take_turns_on_a_gpu_do_not_write_to_the_run() -> None:
    """They write nothing to the run directory, so it need not be shared."""
    objects(TURNS)


OUTPUTS = mounted("/workspace/outputs", {}, hostPath={"path": "/fast"})
OFFLOADING = {"placement": TURNS["placement"], **ON_CPU}
OFFLOADED = {**TURNS["job"], "trainer": {"default_local_dir": "outputs/run"}}


@pytest.mark.parametrize(
    "values",
    [
        {
            "job": {"trainer": {"profile_steps": [2]}},
            "controller": OUTPUTS,
            "groups": {"actor": OUTPUTS, "critic": OUTPUTS},
        },
        OFFLOADING | {"job": OFFLOADED, "controller": OUTPUTS, "groups": {"a": OUTPUTS}},
        OFFLOADING | {"job": OFFLOADED | IN_STORE, "controller": STORE, "groups": {"a": STORE}},
    ],
    ids=["traces", "weights in a claim", "weights in /tmp"],
)
def test_nobody_else_has_to_see_offloaded_weights_and_traces(values: dict[str, Any]) -> None:
    objects(values)


def test_traces_in_a_folder_of_the_pods_own_are_refused() -> None:
    groups = {"actor": STORE, "critic": STORE}
    job = {"trainer": IN_STORE["trainer"] | {"profile_steps": [2]}}
    said = refusal({"job": job, "controller": STORE, "groups": groups})
    assert said.startswith(f"{RUN} /tmp/store/run, but pods of group re")
    assert LOST in said


NO_CLAIM = "NO CLAIM HAS /data/a"
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
def test_the_notes_say_which_claim_has_the_run_and_if_it_is_kept(
    path: str, storage: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """One in no claim is not refused, as something that the chart does not know may mount a volume there. Nor
    are dumps. The notes also say what an uninstalled run loses."""
    trainer = {"default_local_dir": path, "rollout_data_dir": path, "save_freq": 20}
    text = notes({"job": {"trainer": trainer}, "storage": storage}, tmp_path)
    assert f"It writes to {path}" in text
    assert "stop it before you uninstall it, or it loses" in text
    assert "(each 20 steps)" in text
    assert said in text
    for key in ("default_local_dir", "rollout_data_dir"):
        assert (f"set job.trainer.{key}\n" in text) == (said == NO_CLAIM)
    for words in (NO_CLAIM, KEPT, DELETED):
        assert (words in text) == (words in said)


def test_the_notes_know_a_claim_that_pods_mount_a_second_time(tmp_path: Path) -> None:
    again = mounted("/mnt", {}, persistentVolumeClaim={"claimName": "demo-workspace"})
    storage = {"workspace": {"keep": False}}
    text = notes(
        {"job": {"trainer": {"default_local_dir": "/mnt/run"}}, "storage": storage, "pods": again}, tmp_path
    )
    assert f"It writes to /mnt/run in claim demo-workspace. {DELETED} (storage.workspace.keep)" in text


@pytest.mark.parametrize(
    ("trainer", "is_said"),
    [({}, True), ({"save_best": "val-core/a/acc/mean@1", "test_freq": 5}, False), ({"val_only": True}, False)],
)
def test_the_notes_say_if_nothing_will_be_saved(trainer: dict[str, Any], is_said: bool, tmp_path: Path) -> None:
    said = notes({"job": {"trainer": trainer}}, tmp_path)
    assert ("NOTHING WILL BE SAVED: job.trainer.save_freq is -1" in said) == is_said


def test_a_tilde_elsewhere_stays() -> None:
    objects({"job": {"trainer": {"default_local_dir": "./~/a~"}, "rollout": {"stop": ["~"]}}})


def test_the_chart_knows_every_key_that_is_a_path() -> None:
    ends = ("path", "paths", "dir", "dirs", "file", "files")
    named = {
        key for key in leaves(JobConfig) if key.endswith(tuple(f"{sep}{end}" for sep in "._" for end in ends))
    }
    assert {*path_keys(JobConfig)} == named | {"plugins"}
