"""The chart and the local launcher make the same processes of a job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import (
    EXAMPLES,
    ROOT,
    Object,
    heads,
    notes,
    objects,
    of_kind,
    template,
    workloads,
)

from rolemesh.catalog.role_specs import ROLES as DECLARED
from rolemesh.config.job import JobConfig, load_job, make_job
from rolemesh.fingerprint import fingerprint

ROLES = tuple(DECLARED)


def _read(things: list[Object]) -> Any:
    """The job as a process reads it."""
    (config,) = [t for t in of_kind(things, "ConfigMap") if t["metadata"]["name"] == "demo-job"]
    return make_job(yaml.safe_load(config["data"]["job.yaml"]))


# A file that is merged over another one is no job.
JOB_FILES = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "train_files" in path.read_text()]


@pytest.mark.parametrize("path", JOB_FILES, ids=lambda path: path.stem)
def test_a_job_file_pasted_under_job_is_the_same_job(path: Path, tmp_path: Path) -> None:
    """Word for word but for its placement, though Helm reads YAML 1.1, where the key n is a boolean."""
    text = re.sub(r"(?m)^placement:\n(  .*\n)*", "", path.read_text(encoding="utf-8"))
    values = tmp_path / "values.yaml"
    values.write_text("job:\n" + "".join(f"  {line}\n" for line in text.splitlines()), encoding="utf-8")
    on_cpu = {"image": {"kind": "gpu"}, "job": {"trainer": {"device": "auto"}}}
    job = load_job(path, ["trainer.device=auto"])
    assert _read(objects(on_cpu, files=[values])) == job


def test_resources_of_roles_that_take_turns() -> None:
    """The most CPU and GPUs of any, the sum of the memory; a group's own numbers win."""
    actor = {"requests": {"cpu": "1500m", "memory": "1.5Gi"}, "limits": {"cpu": 2, "memory": "2Gi"}}
    rollout = {"requests": {"cpu": 1, "memory": "512Mi"}, "limits": {"memory": "2G"}}
    roles = {"actor": {"gpus": 1, "resources": actor}, "rollout": {"gpus": 2, "resources": rollout}}
    engine = {"rollout": {"name": "vllm", "tensor_model_parallel_size": 2}}
    values = {"placement": {"strategy": "hybrid"}, "roles": roles, "job": engine}
    container = _containers(values)["demo-policy"]
    assert container["resources"] == {
        "requests": {"cpu": "1500m", "memory": "2Gi", "ephemeral-storage": "1Gi"},
        "limits": {"memory": str(2 * 1024**3 + 2 * 10**9), "nvidia.com/gpu": 2},
    }
    assert container["args"][-1] == "trainer.device=cuda"
    without = _containers({"roles": {"actor": {"gpus": 0}}})["demo-actor"]
    assert "trainer.device=cuda" not in without["args"]
    engine["rollout"]["tensor_model_parallel_size"] = 8
    own = {"gpus": 8, "resources": {"requests": {"cpu": 7}}}
    container = _containers(values | {"groups": {"policy": own}})["demo-policy"]
    assert container["resources"] == {
        "requests": {"cpu": 7, "ephemeral-storage": "1Gi"},
        "limits": {"nvidia.com/gpu": 8},
    }


def _containers(values: dict[str, Any]) -> dict[str, Object]:
    return {
        t["metadata"]["name"]: t["spec"]["template"]["spec"]["containers"][0]
        for t in workloads(objects(values))
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_notes_count_the_gpus_that_pods_request(example: Path, tmp_path: Path) -> None:
    said = notes({}, tmp_path, files=[example])
    asked = sum(
        thing["spec"]["replicas"] * container["resources"]["limits"].get("nvidia.com/gpu", 0)
        for thing in workloads(objects({}, files=[example], chart=tmp_path / "chart"))  # of the same render
        for container in thing["spec"]["template"]["spec"]["containers"]
    )
    assert f"It uses {asked} GPUs (nvidia.com/gpu) in total." in said


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_roles_pods_have_the_job_fingerprint_of_the_controller(example: Path, tmp_path: Path) -> None:
    things = objects({}, files=[example])
    (tmp_path / "job.yaml").write_text(
        next(thing["data"]["job.yaml"] for thing in of_kind(things, "ConfigMap") if "job.yaml" in thing["data"])
    )

    def read(workload: Object) -> tuple[list[str], JobConfig]:
        """The roles of a process, and the job as it reads it."""
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        overrides = [word for word in container["args"] if "=" in word and word[0] != "-"]
        return container["args"][1].split(","), load_job(tmp_path / "job.yaml", overrides)

    ((_, of_controller),) = map(read, of_kind(things, "Job"))
    for roles, of_pod in map(read, (*workloads(things), *heads(things))):
        for role in roles:
            assert fingerprint(of_controller, role).difference(fingerprint(of_pod, role)) == ""


def test_notes_of_a_scaled_role_tell_of_the_most(tmp_path: Path) -> None:
    scaler = {"scaler": "hpa", "minReplicas": 2, "maxReplicas": 5}
    said = notes({"autoscaling": {"reward": scaler}, "roles": {"reward": {"gpus": 1}}}, tmp_path)
    assert re.search(r"deployment/demo-reward +2 to 5 x 1 GPUs: reward", said)
    assert "It uses 5 GPUs (nvidia.com/gpu) in total, and up to 8 when scaled up." in said
    values = {"autoscaling": {"reward": scaler}, "placement": {"ranks": {"actor": 16}}}
    said = notes(values | {"roles": {"reward": {"gpus": 1}, "actor": {"gpus": 16}}}, tmp_path)
    assert "It uses 20 GPUs (nvidia.com/gpu) in total, and up to 23 when scaled up." in said


def on_cluster(into: Path, condition: str, *, pods: int, asked: int = 1) -> Path:
    """Copy the chart, with what `lookup` would find: a Job with this condition, and the pods of each group."""
    notes({}, into)
    commands = into / "chart" / "templates" / "_commands.tpl"
    annotated = f'dict "annotations" (dict "rolemesh.dev/replicas" "{asked}")'
    live = f'dict "metadata" ({annotated}) "spec" (dict "replicas" {pods})'
    text = commands.read_text(encoding="utf-8")
    text = text.replace('lookup "apps/v1" $group.kind $namespace $group.workload', live)
    job = f'dict "status" (dict "conditions" (list (dict "type" "{condition}" "status" "True")))'
    text, num_jobs = re.subn('lookup "batch/v1" .*?(?= }})', job, text)
    assert (live in text, num_jobs) == (True, 2)
    commands.write_text(text, encoding="utf-8")
    return into / "chart"


@pytest.mark.parametrize("condition", ["Complete", "Failed", "Suspended"])
def test_an_upgrade_after_the_run_starts_no_pods(condition: str, tmp_path: Path) -> None:
    """The notes say so."""
    chart, has_ended = on_cluster(tmp_path, condition, pods=0), condition != "Suspended"
    values = {"placement": {"replicas": {"reward": 2}}}
    assert ("THE RUN HAS ENDED" in notes(values, tmp_path)) == has_ended
    counts = [thing["spec"]["replicas"] for thing in workloads(objects(values, chart=chart))]
    assert sorted(counts) == [0, 0, 0, 0 if has_ended else 2]


@pytest.mark.parametrize(("pods", "members"), [(1, 4), (2, 5), (5, 6), (0, 6)])
def test_a_gang_asks_for_no_more_pods_than_an_upgrade_leaves(pods: int, members: int, tmp_path: Path) -> None:
    """Of the reward's three: somebody has scaled it, or the run has ended."""
    chart = on_cluster(tmp_path, "Suspended", pods=pods, asked=3)
    values = {"gang": {"scheduler": "volcano"}, "placement": {"replicas": {"reward": 3}}}
    (gang,) = of_kind(objects(values, chart=chart), "PodGroup")
    assert gang["spec"]["minMember"] == members


def test_notes_tell_what_brings_the_alerts(tmp_path: Path) -> None:
    assert "Install the Prometheus operator" in notes({}, tmp_path, apis=())
    assert "A PodMonitor makes Prometheus scrape" in notes({}, tmp_path)


def test_notes_warn_of_a_memory_limit_that_only_a_guess_exceeds(tmp_path: Path) -> None:
    """27.6 GiB of weights and 7 GiB of processes, of 32 GiB."""
    values = {"job": {"rollout": {"name": "vllm"}}, "roles": {"rollout": {"billionParameters": 14.8}}}
    said = notes(values, tmp_path)
    assert (
        "PERHAPS TOO LITTLE MEMORY: a pod of group rollout has a memory limit of 32Gi, but its rollout" in said
    )
    assert "PERHAPS" not in notes({}, tmp_path)


def test_names_of_53_characters_fit_and_differ() -> None:
    """A Service's name has 63 at most, a StatefulSet's 52: its pods carry it and a hash of ten in a label."""
    first, second = "a" * 52 + "b", "a" * 52 + "c"
    values = {"placement": {"strategy": "custom", "groups": {"g" * 24: list(ROLES)}}}
    made = [objects(values, release=release) for release in (first, second)]
    names = [{(t["kind"], t["metadata"]["name"]) for t in things} for things in made]
    assert not names[0] & names[1]
    assert all(len(name) <= 52 for _, name in names[0] | names[1])
    assert template(values, release=first).count(first) > 10  # labels have all of it


def test_the_order_of_a_groups_roles_changes_no_immutable_field() -> None:
    """The API server refuses an upgrade that changes another field than replicas, template and a few more."""

    def fixed(*learn: str) -> list[Object]:
        groups = {"learn": learn, "rest": [role for role in ROLES if role not in learn]}
        things = objects({"placement": {"strategy": "custom", "groups": groups}})
        return [
            {key: value for key, value in thing["spec"].items() if key not in ("template", "replicas")}
            for thing in of_kind(things, "StatefulSet")
        ]

    (expected,) = fixed("actor", "critic", "reference")
    assert expected["serviceName"] == "demo-actor"
    assert fixed("reference", "critic", "actor") == fixed("critic", "actor", "reference") == [expected]
    (alone,) = fixed("actor", "rollout", "reward", "critic")
    assert alone == expected
