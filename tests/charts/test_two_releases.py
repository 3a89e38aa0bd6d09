"""Two releases beside each other, and one release after another."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rendering import (
    EXAMPLES,
    Object,
    objects,
    of_kind,
    pods,
    refusal,
    schema_errors,
    selects,
    template,
    workloads,
)

from rolemesh.config import parse_overrides
from rolemesh.config.job import make_job
from rolemesh.services.command_line.app import app

NO_DASHBOARDS = {"monitoring": {"dashboards": {"enabled": False}}}
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
GOLDEN = Path(__file__).parent / "golden"
TINY = [path for path in EXAMPLES if path.stem.startswith("tiny-")]


@pytest.mark.parametrize("example", TINY, ids=lambda path: path.stem)
def test_an_example_renders_as_it_did(example: Path) -> None:
    """`make chart` renews these; the difference shows in review what a change means."""
    golden = GOLDEN / example.name
    apis = ["ray.io/v1/RayCluster"] if example.stem == "tiny-ranks" else []
    text = template(NO_DASHBOARDS, release="rlhf-job", apis=apis, files=[example])
    if os.environ.get("GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert golden.read_text(encoding="utf-8") == text


def selectors(thing: Any) -> Iterator[Object]:
    """Every label selector in an object, wherever it is."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            if key in ("selector", "podSelector", "labelSelector") and isinstance(value, dict):
                yield value
            else:
                yield from selectors(value)
    elif isinstance(thing, list):
        for item in thing:
            yield from selectors(item)


def test_two_releases_in_a_namespace_never_touch_each_other() -> None:
    """Also where one's name begins the other's, and every selector is in use."""
    values = {"autoscaling": {"rollout": {"scaler": "hpa", "maxReplicas": 2}}, "storage": {"singleNode": True}}
    ours, theirs = objects(values, release="job"), objects(values, release="job-reward")
    for mine, other in ((ours, theirs), (theirs, ours)):
        labels = [pod["metadata"]["labels"] for pod in pods(other)]
        found = [selector for thing in mine for selector in selectors(thing)]
        assert len(found) > 20
        assert not [s for s in found for taken in labels if selects(s, taken)]
    names = [{(thing["kind"], thing["metadata"]["name"]) for thing in things} for things in (ours, theirs)]
    assert not names[0] & names[1]


SAME_PODS: dict[str, dict[str, Any]] = {
    "more replicas": {"placement": {"replicas": {"reward": 5}}},
    "a scaler": {"autoscaling": {"reward": {"scaler": "hpa", "maxReplicas": 3}}},
    "no dashboards": {"monitoring": {"dashboards": {"enabled": False}}},
    "another look of the dashboards": {
        "monitoring": {"dashboards": {"labels": {"a": "b"}}, "labels": {"c": "d"}}
    },
    "no operator": {"monitoring": {"operator": "never"}},
    "no policies": {"networkPolicy": {"enabled": False}, "disruptionBudgets": False},
    "a suspended run": {"controller": {"suspend": True}},
    "a larger claim": {"storage": {"workspace": {"size": "40Gi"}}},
}


@pytest.mark.parametrize("values", SAME_PODS.values(), ids=SAME_PODS)
def test_an_upgrade_restarts_nothing_that_did_not_change(values: dict[str, Any]) -> None:
    before, after = objects({}), objects(values)
    assert _templates(before) == _templates(after)
    assert _templates(before, "Job") == _templates(after, "Job")  # the name, too: it is a hash of the pod


def test_a_changed_job_restarts_all_pods_and_a_role_only_its_own() -> None:
    """A changed job restarts what reads it; a changed role restarts only itself."""
    before = _templates(objects({}))
    job = _templates(objects({"job": {"trainer": {"total_epochs": 2}}}))
    assert all(before[name] != job[name] for name in before)
    role = _templates(objects({"roles": {"reward": {"gpus": 1}}}))
    assert [name for name in before if before[name] != role[name]] == ["demo-reward"]
    runs = [of_kind(objects(values), "Job")[0]["metadata"]["name"] for values in ({}, {"image": {"tag": "2"}})]
    assert runs[0] != runs[1]  # a Job's pod cannot be changed


def _templates(things: list[Object], *kinds: str) -> dict[str, Object]:
    chosen = of_kind(things, *kinds) if kinds else workloads(things)
    return {thing["metadata"]["name"]: thing["spec"]["template"] for thing in chosen}


def test_settings_of_pods_are_in_pods_and_a_groups_override_them() -> None:
    gpu = {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"gpu": "h100"},
        "runtimeClassName": "nvidia",
    }
    values = {
        "gpu": gpu,
        "pods": {"priorityClassName": "high", "env": [{"name": "A", "value": "1"}], "sharedMemory": "8Gi"},
        "groups": {"reward": {"priorityClassName": "low", "topologyKey": "", "graceSeconds": 900}},
        "huggingFace": {"secret": "hub"},
        "prepare": [{"creates": "x", "command": ["fetch", "x"]}],
        "image": {"pullSecrets": ["registry"]},
        "storage": {"models": {"existingClaim": "weights"}},
        "job": {"actor": {"model": {"path": "/models/qwen"}}},
    }  # fmt: skip
    specs = {name: template["spec"] for name, template in _templates(objects(values)).items()}
    actor, reward = specs["demo-actor"], specs["demo-reward"]
    assert {key: actor[key] for key in gpu} == gpu
    assert not reward.keys() & gpu.keys()
    assert (actor["priorityClassName"], reward["priorityClassName"]) == ("high", "low")
    assert "topologySpreadConstraints" not in reward
    assert (actor["terminationGracePeriodSeconds"], reward["terminationGracePeriodSeconds"]) == (30, 900)
    assert "--drain=895" in reward["containers"][0]["args"]
    env = {entry["name"]: entry for entry in actor["containers"][0]["env"]}
    assert env["A"]["value"] == "1"
    assert "HF_TOKEN" not in env  # only where something is fetched
    assert actor["imagePullSecrets"] == [{"name": "registry"}]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in actor["containers"][0][
        "volumeMounts"
    ]
    weights = {"claimName": "weights", "readOnly": True}
    assert {"name": "models", "persistentVolumeClaim": weights} in actor["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in actor["volumes"]


def test_a_new_reward_function_restarts_reward_and_controller() -> None:
    """When it changes, another controller replaces the old one, which takes no pod with the new function."""
    path = {"job": {"reward": {"custom_reward_function": {"path": "/etc/rolemesh-reward/reward.py"}}}}
    code = "def compute_score(*args):\n    return '{{ not a template }}'\n"
    made = [objects(path | {"rewardFunction": {"code": text}}) for text in (code, code + "# more\n")]
    (config,) = [t for t in of_kind(made[0], "ConfigMap") if "reward.py" in t["data"]]
    assert config["data"]["reward.py"] == code
    templates = [_templates(things) for things in made]
    assert [name for name in templates[0] if templates[0][name] != templates[1][name]] == ["demo-reward"]
    [before], [after] = (of_kind(things, "Job") for things in made)
    assert before["metadata"]["name"] != after["metadata"]["name"]
    [trial] = of_kind(made[0], "Pod")
    for spec in (templates[0]["demo-reward"]["spec"], before["spec"]["template"]["spec"], trial["spec"]):
        mounts = spec["containers"][0]["volumeMounts"]
        assert {"name": "reward", "mountPath": "/etc/rolemesh-reward", "readOnly": True} in mounts
        assert {"name": "reward", "configMap": {"name": "demo-reward-function"}} in spec["volumes"]
    assert "/etc/rolemesh-reward" not in json.dumps(templates[0]["demo-actor"])


@pytest.mark.parametrize("scheduler", ["volcano", "coscheduling"])
def test_a_gang_is_all_pods_of_the_roles(scheduler: str) -> None:
    values: Object = {"gang": {"scheduler": scheduler, "queue": "lab"}}
    if scheduler == "coscheduling":
        values = {"gang": {"scheduler": scheduler}, "pods": {"schedulerName": "scheduler-plugins-scheduler"}}
    things = objects(values | {"placement": {"replicas": {"reward": 3, "rollout": 2}}})
    for pod in _templates(things).values():
        said = pod["metadata"]["labels"] | pod["metadata"]["annotations"]
        assert "demo-gang" in said.values()
    (group,) = of_kind(things, "PodGroup")
    assert scheduler == "volcano" or not schema_errors(json.dumps(group))
    assert group["spec"]["minMember"] == 7
    (job,) = _templates(things, "Job").values()
    assert "demo-gang" not in str(job)


def test_kueue_admits_trained_roles_together_and_others_singly() -> None:
    """Each pod of a gang has its size, so no role that can be scaled is in it: the trained would restart."""
    kueue: Any = {"gang": {"scheduler": "kueue", "queue": "0x1"}}  # a text, though YAML has a number for it
    found = {name: pod["metadata"] for name, pod in _templates(objects(kueue)).items()}
    for name, metadata in found.items():
        assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "0x1"
        is_in_gang = metadata["labels"].get("kueue.x-k8s.io/pod-group-name") == "demo-gang"
        assert is_in_gang == (name in ("demo-actor", "demo-critic"))
        count = metadata["annotations"].get("kueue.x-k8s.io/pod-group-total-count")
        assert count == ("2" if is_in_gang else None)
    assert not of_kind(objects(kueue), "PodGroup")
    more = objects(kueue | {"placement": {"replicas": {"reward": 3, "rollout": 2}}})
    assert _templates(more) == _templates(objects(kueue))


@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_gitops_manifests_omit_replicas_that_the_controller_sets(scaler: str) -> None:
    """A tool that applies what `helm template` renders takes back what it finds changed."""
    scaled = {"autoscaling": {"rollout": {"scaler": scaler, "minReplicas": 2, "maxReplicas": 4}}}
    values = {"controller": {"scaleUp": True}, "placement": {"replicas": {"reward": 3}}} | scaled
    things = objects(values)
    assert not [thing for thing in workloads(things) if "replicas" in thing["spec"]]
    wanted = {
        t["metadata"]["name"]: t["metadata"]["annotations"]["rolemesh.dev/replicas"] for t in workloads(things)
    }
    assert wanted == {"demo-actor": "1", "demo-critic": "1", "demo-rollout": "2", "demo-reward": "3"}
    (job,) = _templates(things, "Job").values()
    args = job["spec"]["containers"][0]["args"]
    assert "--scale-up" in args
    by_controller = {
        arg.rpartition("/")[2] for arg in args if re.match("--scale-down=(deployment|statefulset)/", arg)
    }
    (role,) = of_kind(things, "Role")
    read = {
        name for rule in role["rules"] if {*rule["resources"]} & {"deployments", "statefulsets"}
        for name in rule["resourceNames"] if rule["verbs"] == ["get"]
    }  # fmt: skip
    assert not [t for t in of_kind(things, "PodDisruptionBudget") if "minAvailable" in t["spec"]]
    assert read == by_controller == wanted.keys() - ({"demo-rollout"} if scaler == "keda" else set())
    for other in ({"scaleDown": False}, {"rbac": False}):
        assert "it scales down" in refusal({"controller": {"scaleUp": True} | other})
    assert "pods of actor to their node" in refusal(values | {"storage": {"singleNode": True}})


def test_without_rbac_dns_finds_replicas_and_no_pod_has_a_token() -> None:
    things = objects({"controller": {"rbac": False}})
    assert not of_kind(things, "Role", "RoleBinding", "ServiceAccount")
    (job,) = _templates(things, "Job").values()
    args = job["spec"]["containers"][0]["args"]
    assert "--reward=dns:demo-reward:50051" in args
    assert not [arg for arg in args if arg.startswith("--scale-down")]
    assert not any(pod["spec"]["automountServiceAccountToken"] for pod in pods(things))
    budgets = [thing["spec"] for thing in of_kind(things, "PodDisruptionBudget")]
    assert budgets
    assert not [budget for budget in budgets if "minAvailable" in budget]  # nobody would delete it


@pytest.mark.parametrize("tls", ["none", "certManager"])
def test_the_command_line_knows_what_pods_say(tls: str) -> None:
    """Each option of every process, and the overrides of `helm test`."""
    things = objects({"tls": {"mode": tls}, "controller": {"scaleUp": True}})
    commands = [container["args"] for pod in pods(things) for container in pod["spec"]["containers"]]
    check = next(args for args in commands if "rolemesh control" in args[0])
    commands[commands.index(check)] = ["control", *check[2:]]
    assert sorted(args[0] for args in commands) == ["control", "control", "serve", "serve", "serve", "serve"]
    for name, *args in commands:
        parsed = COMMANDS[name].make_context(name, list(args)).params
        assert parsed["config"] == Path("/etc/rolemesh/job.yaml")
        make_job(parse_overrides(parsed["overrides"] or ()))
