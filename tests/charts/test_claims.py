"""What a pod mounts, and where it may write, by the chart's values."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from namespaces import as_container, needs_namespaces, terminate
from rendering import Object, objects, of_kind, pods, refusals, workloads

WAITS = ["sh", "-c", 'trap "exit 143" TERM; until test -e "$0"; do sleep 1 & wait $!; done']

CLAIMS = {
    "models": {"existingClaim": "models"},
    "data": {"existingClaim": "data"},
    "checkpoints": {"existingClaim": "checkpoints"},
}


def mounts(values: Object) -> dict[str, dict[str, bool]]:
    """Component to its claims, and whether it may write there."""
    found = {}
    things = objects({"storage": CLAIMS} | values)
    for thing in (*workloads(things), *of_kind(things, "Job")):
        pod = thing["spec"]["template"]["spec"]
        claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
        found[thing["metadata"]["labels"]["app.kubernetes.io/component"]] = {
            mount["name"]: not mount["readOnly"]
            for mount in pod["containers"][0]["volumeMounts"]
            if mount["name"] in claims
        }
    return found


def test_a_pod_mounts_the_workspace_and_the_claims_of_its_paths() -> None:
    job = {
        "actor": {"model": {"path": "/models/qwen"}},
        "data": {"train_files": "/data/train.parquet"},
        "trainer": {"default_local_dir": "/checkpoints/run"},
    }
    trained = {"workspace": True, "models": False, "checkpoints": True}
    assert mounts({"job": job}) == {
        "actor": trained,
        "critic": trained,
        "rollout": {"workspace": True, "models": False},
        "reward": {"workspace": False, "models": False},
        "controller": {"workspace": True, "models": False, "data": False, "checkpoints": True},
    }
    for path in ("/checkpoints/older/global_step_20", "../checkpoints/older/global_step_20"):
        resumed = {"resume_mode": "resume_path", "resume_from_path": path}
        found = mounts({"job": {"trainer": resumed}})
        assert {name for name in found if "checkpoints" in found[name]} == {"actor", "critic", "controller"}
    assert mounts({"job": {"trainer": resumed | {"resume_mode": "auto"}}})["actor"] == {"workspace": True}
    assert mounts({}) | {"controller": {}} == {
        "actor": {"workspace": True},
        "critic": {"workspace": True},
        "rollout": {"workspace": True},
        "reward": {"workspace": False},
        "controller": {},
    }


@pytest.mark.parametrize(
    ("values", "claim"),
    [
        ({"job": {"reward": {"custom_reward_function": {"path": "/data/judge.py"}}}}, "data"),
        (
            {"job": {"reward": {"custom_reward_function": {"path": "r.py", "reward_kwargs": {"at": "/data"}}}}},
            "data",
        ),
        ({"prepare": [{"creates": "x", "command": ["sh", "-c", "fetch >/models/x"]}]}, "models"),
        ({"groups": {"reward": {"env": [{"name": "HF_HOME", "value": "/models/cache"}]}}}, "models"),
    ],
)
def test_a_path_anywhere_in_what_a_pod_reads_brings_its_claim(values: Object, claim: str) -> None:
    assert mounts(values)["reward"] == {"workspace": False, claim: False}


NESTED = {
    "models": {"existingClaim": "models", "mountPath": "/workspace/models"},
    "data": {"existingClaim": "data", "mountPath": "/workspace/code/"},
    "checkpoints": {"size": "1Ti", "mountPath": "/workspace/outputs"},
}


def test_a_relative_path_brings_its_claim_too() -> None:
    job = {"critic": {"model": {"path": "./models/x"}}, "plugins": ["code/losses.py"]}
    found = mounts({"storage": NESTED, "job": job})  # the run directory is outputs/run
    every = {"workspace": True, "models": False, "data": False, "checkpoints": True}
    assert found == {
        "actor": {"workspace": True, "data": False, "checkpoints": True},
        "critic": every,
        "rollout": {"workspace": True, "data": False},
        "reward": {"workspace": False, "data": False},
        "controller": every,
    }
    values = {"prepare": [{"creates": "models/x", "command": ["make"]}]}
    storage = NESTED | {"checkpoints": CLAIMS["checkpoints"]}
    above = mounts(
        values | {"storage": storage, "job": {"trainer": {"default_local_dir": "../checkpoints/run"}}}
    )
    assert {pod for pod in above if "checkpoints" in above[pod]} == {"actor", "critic", "controller"}
    assert {pod for pod in above if "models" in above[pod]} == above.keys()


def test_a_path_that_only_begins_like_a_claims_brings_nothing() -> None:
    job = {"actor": {"model": {"path": "/models-2/qwen"}}, "critic": {"model": {"path": "x/models/qwen"}}}
    assert mounts({"job": job})["critic"] == {"workspace": True}


@pytest.mark.parametrize(
    "values",
    [
        {"rewardFunction": {"writes": True}},
        {"job": {"trainer": {"profile_steps": [2]}}},
        {"placement": {"strategy": "hybrid"}},  # roles that take turns offload their weights there
    ],
)
def test_reward_pods_write_to_the_workspace_if_the_job_says_so(values: Object) -> None:
    found = mounts(values)
    assert found.get("reward", found.get("scoring")) == {"workspace": True}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"prepare": [{"creates": "out/model", "command": ["make"]}], "huggingFace": {"fetch": True}},
        {
            "huggingFace": {"fetch": True, "cache": "/models/hub"},
            "storage": CLAIMS | {"models": {"existingClaim": "models", "readOnly": False}},
        },
    ],
)
def test_a_claim_that_no_pod_writes_to_is_read_only_to_kubelet(values: Object) -> None:
    """Else it changes the group of every file to fsGroup. In a local volume it does so for the first pod that
    mounts it and for no other, so a pod that only reads must not come first without it."""
    job = {"actor": {"model": {"path": "/models/qwen"}}, "data": {"train_files": "/data/train.parquet"}}
    references: dict[str, set[bool]] = {}
    mounted: dict[str, set[bool]] = {}
    for pod in pods(objects({"storage": CLAIMS, "job": job, "supplementalGroups": [2000]} | values)):
        spec = pod["spec"]
        assert spec["securityContext"]["supplementalGroups"] == [2000]
        for volume in spec["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                references.setdefault(volume["name"], set()).add(claim.get("readOnly", False))
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            for mount in container["volumeMounts"]:
                mounted.setdefault(mount["name"], set()).add(mount.get("readOnly", False))
    assert references == {name: {all(mounted[name])} for name in references}
    assert references["data"] == {True}
    assert references["workspace"] == {False}


READ_ONLY = {"checkpoints": {"existingClaim": "mine", "readOnly": True}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"storage": {"workspace": {"readOnly": True}}},
            "storage.workspace.readOnly is true, but the controller takes its lock there: set it to false",
        ),
        (
            {"storage": READ_ONLY, "job": {"trainer": {"default_local_dir": "/checkpoints/a"}}},
            "the run directory (job.trainer.default_local_dir) is /checkpoints/a, but storage.checkpoints is "
            "read-only: set storage.checkpoints.readOnly to false, or write to another claim",
        ),
        (
            {"storage": READ_ONLY, "job": {"trainer": {"rollout_data_dir": "../checkpoints/a"}}},
            "job.trainer.rollout_data_dir is /checkpoints/a, but storage.checkpoints is read-only: set",
        ),
        (
            {
                "storage": {"data": {"size": "1Gi", "mountPath": "/workspace/outputs/"}},
                "job": {"trainer": {"experiment_name": "a"}},
            },
            "(job.trainer.default_local_dir) is /workspace/outputs/a, but storage.data is read-only",
        ),
        (
            {
                "storage": {"models": {"existingClaim": "mine", "readOnly": False}},
                "huggingFace": {"fetch": True},
                "job": {"trainer": {"default_local_dir": "/models/a"}},
            },
            "is /models/a, but with huggingFace.fetch a run mounts storage.models read-only: write to another",
        ),
    ],
)
def test_a_read_only_claim_that_the_run_writes_to_is_refused(values: Object, words: str) -> None:
    [said] = refusals(values)
    assert words in said


def test_a_run_writes_to_a_claim_mounted_inside_a_read_only_one() -> None:
    within = {"models": {"existingClaim": "a", "mountPath": "/mnt"}, "data": {"existingClaim": "b"}}
    storage = within | {"checkpoints": {"existingClaim": "c", "mountPath": "/mnt/runs"}}
    found = mounts({"storage": storage, "job": {"trainer": {"default_local_dir": "/mnt/./runs"}}})
    assert all(found[pod]["checkpoints"] for pod in ("actor", "critic", "controller"))


def test_a_pod_that_may_not_write_waits_for_what_others_prepare() -> None:
    values = {"prepare": [{"creates": "out/model", "command": ["rolemesh", "demo", "out"]}]}
    first = {
        thing["metadata"]["name"]: thing["spec"]["template"]["spec"]["initContainers"][0]["command"]
        for thing in workloads(objects(values))
    }
    assert first["demo-actor"] == ["rolemesh", "prepare"]
    assert first["demo-reward"] == WAITS


@needs_namespaces
def test_a_pod_that_waits_for_preparation_ends_at_sigterm(tmp_path: Path) -> None:
    """Else it keeps its GPUs until it is killed: the shell is process 1, which needs a trap."""
    begun, sleep = tmp_path / "begun", tmp_path / "sleep"
    os.mkfifo(begun)
    sleep.write_text(f"#!/bin/sh\necho >{begun}\nexec /bin/sleep 60\n")
    sleep.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with as_container(*WAITS, "made", cwd=tmp_path, env=path) as waiting:
        begun.read_text()
        terminate(waiting)
        assert waiting.wait(timeout=30) == 128 + signal.SIGTERM
    sleep.write_text("#!/bin/sh\ntouch made\n")
    assert subprocess.run([*WAITS, "made"], cwd=tmp_path, env=path, timeout=30).returncode == 0


CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


def caches(values: Object) -> dict[str, list[str]]:
    """Component to the folders of its caches, for pods that mount the claim."""
    found = {}
    for pod in pods(objects(values)):
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])):
            env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
            mounted = [m["readOnly"] for m in container["volumeMounts"] if m["mountPath"] == "/caches"]
            assert mounted == ([False] if CACHES[0] in env else [])
            if mounted:
                found[pod["metadata"]["labels"]["app.kubernetes.io/component"]] = [env[key] for key in CACHES]
    return found


def test_kernels_are_cached_by_image_on_gpus_without_user_code() -> None:
    assert caches({}) == {}
    values: Object = {
        "storage": {"caches": {"existingClaim": "kernels"}},
        "job": {"reward": {"reward_model": {"enable": True}}},
        "roles": {"reward": {"gpus": 1}, "critic": {"gpus": 0}},
    }
    found = caches(values)
    assert found.keys() == {"actor", "rollout"}
    [[inductor, triton, vllm]] = {tuple(folders) for folders in found.values()}
    folder = inductor.removesuffix("/inductor")
    assert (triton, vllm) == (f"{folder}/triton", f"{folder}/vllm")
    assert folder.startswith("/caches/")
    other = caches(values | {"image": {"tag": "other"}})
    assert other.keys() == found.keys()
    assert not {path for paths in other.values() for path in paths} & {inductor, triton, vllm}


def test_scratch_is_requested_unless_the_resources_name_a_disk() -> None:
    values: Object = {
        "pods": {"scratchRequest": "5Gi"},
        "groups": {"critic": {"scratchRequest": 1024}},
        "roles": {
            "rollout": {"resources": {"requests": {"ephemeral-storage": "1Gi"}}},
            "reward": {"resources": {"limits": {"ephemeral-storage": "2Gi"}}},
        },
    }
    asked = {}
    for thing in workloads(objects(values)):
        [container] = thing["spec"]["template"]["spec"]["containers"]
        requests = container["resources"]["requests"]
        asked[thing["metadata"]["name"]] = requests.get("ephemeral-storage")
        assert requests["cpu"]
    assert asked == {"demo-actor": "5Gi", "demo-critic": 1024, "demo-rollout": "1Gi", "demo-reward": None}
    without = pods(objects({"pods": {"scratchRequest": ""}}))
    assert "ephemeral-storage" not in str([pod["spec"]["containers"] for pod in without])


@pytest.mark.parametrize(
    ("values", "size"),
    [
        ({}, "1Gi"),
        ({"placement": {"ranks": {"actor": 8}}, "roles": {"actor": {"gpus": 8}}}, "8Gi"),
        (
            {"placement": {"ranks": {"actor": 16}}, "roles": {"actor": {"gpus": 16}}},
            "8Gi",
        ),  # in each of two pods
        (
            {"placement": {"ranks": {"actor": 3}}, "roles": {"actor": {"gpus": 0}}, "image": {"kind": "gpu"}},
            "3Gi",
        ),
        ({"groups": {"actor": {"sharedMemory": "64Mi"}}}, "64Mi"),
    ],
)
def test_shared_memory_is_for_each_rank_of_a_pod(values: Object, size: str) -> None:
    for pod in pods(objects(values)):
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "actor":
            [shm] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
            assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


def test_an_engine_over_several_gpus_has_shared_memory_for_each() -> None:
    engine = {"rollout": {"name": "vllm", "tensor_model_parallel_size": 4}}
    for pod in pods(objects({"job": engine, "roles": {"rollout": {"gpus": 4}}})):
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "rollout":
            assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}} in pod["spec"][
                "volumes"
            ]
