"""What the chart renders to, whatever is chosen, is what a cluster accepts and means."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rendering import (
    EXAMPLES,
    STRATEGIES,
    Object,
    groups,
    heads,
    objects,
    of_kind,
    pods,
    schema_errors,
    selects,
    workloads,
)

TLS: dict[str, Any] = {"none": {}, "certManager": {}, "secret": {"secret": "keys"}}
SCALERS = {
    "none": {},
    "hpa": {"reward": {"scaler": "hpa", "maxReplicas": 4}, "rollout": {"scaler": "hpa", "maxReplicas": 2}},
    "keda": {"reward": {"scaler": "keda", "minReplicas": 2, "maxReplicas": 4}},
}
ALONE = ("standalone", "custom")  # reward and rollout have pods of their own


def combinations() -> Iterator[Any]:
    """Each pair of what can be chosen. Scalers need roles alone; the examples are without."""
    for (place, strategy), (kind, tls) in itertools.product(enumerate(STRATEGIES), enumerate(TLS)):
        scaler = ("hpa", "keda")[(place + kind) % 2] if strategy in ALONE else "none"
        monitoring = ("always", "never")[(place + kind // 2) % 2]
        yield pytest.param(
            {
                "job": {"algorithm": {"use_kl_in_reward": True}},
                "placement": STRATEGIES[strategy],
                "monitoring": {"operator": monitoring, "dashboards": {"enabled": monitoring == "always"}},
                "tls": {"mode": tls} | TLS[tls],
                "autoscaling": SCALERS[scaler],
            },
            id=f"{strategy}-{monitoring}-{tls}-{scaler}",
        )


@pytest.mark.parametrize("values", combinations())
def test_a_combination_is_accepted_and_means_what_it_says(values: Object) -> None:
    things = objects(values)
    check(things)
    assert bool(of_kind(things, "PodMonitor")) == (values["monitoring"]["operator"] == "always")
    assert bool(of_kind(things, "Certificate")) == (values["tls"]["mode"] == "certManager")
    secure = values["tls"]["mode"] != "none"
    for pod in pods(things):
        (container,) = pod["spec"]["containers"]
        assert ("--tls-dir=/etc/rolemesh-tls" in container["args"]) == secure
    scalers = of_kind(things, "HorizontalPodAutoscaler", "ScaledObject")
    assert {thing["metadata"]["name"] for thing in scalers} == {
        f"demo-{role}" for role in values["autoscaling"]
    }
    for thing in workloads(things):
        scaled = thing["metadata"]["name"].removeprefix("demo-") in values["autoscaling"]
        assert ("replicas" in thing["spec"]) != scaled


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_accepted(example: Any) -> None:
    check(objects({}, files=[example]))


def check(things: list[Object]) -> None:
    """What a cluster would refuse, and what would go wrong in it in silence."""
    for thing in things:
        assert not schema_errors(json.dumps(thing))
    names = Counter((thing["apiVersion"], thing["kind"], thing["metadata"]["name"]) for thing in things)
    assert max(names.values()) == 1, names.most_common(1)
    for pod in pods(things):
        restricted(pod["spec"])
        mounts_exist(pod["spec"])
    draining(things)
    loading(things)
    selected(things)
    references(things)


def draining(things: list[Object]) -> None:
    """A role has 5 seconds to end once it has drained."""
    for thing in (*workloads(things), *heads(things)):
        spec = thing["spec"]["template"]["spec"]
        (drain,) = [arg for arg in spec["containers"][0]["args"] if arg.startswith("--drain=")]
        assert int(drain.removeprefix("--drain=")) + 5 == spec["terminationGracePeriodSeconds"]


def loading(things: list[Object]) -> None:
    """A pod is ready once it has loaded. A tool that waits for that does not give up before the pod's probe."""
    for thing in of_kind(things, "Deployment"):
        [container] = thing["spec"]["template"]["spec"]["containers"]
        startup = container["startupProbe"]
        assert "readinessProbe" in container
        assert startup["periodSeconds"] * startup["failureThreshold"] < thing["spec"]["progressDeadlineSeconds"]


def restricted(pod: Object) -> None:
    """The Pod Security Standard `restricted`, and what it leaves open."""
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"projected", "configMap", "secret", "emptyDir", "persistentVolumeClaim"}
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
    assert pod["automountServiceAccountToken"] == (pod.get("serviceAccountName") == "demo-controller")


def mounts_exist(pod: Object) -> None:
    volumes = [volume["name"] for volume in pod["volumes"]]
    assert len(set(volumes)) == len(volumes)
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert len(set(paths)) == len(paths)


def selected(things: list[Object]) -> None:
    """Who is behind each Service, budget and policy."""
    above = (*workloads(things), *heads(things))
    templates = {thing["metadata"]["name"]: thing["spec"]["template"] for thing in above}
    (job,) = of_kind(things, "Job")
    templates["demo-controller"] = job["spec"]["template"]
    labels = {name: template["metadata"]["labels"] for name, template in templates.items()}

    def taken(selector: Object) -> set[str]:
        return {name for name in labels if selects(selector, labels[name])}

    for thing in workloads(things):
        assert taken(thing["spec"]["selector"]) == {thing["metadata"]["name"]}
        (spread,) = thing["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert taken(spread["labelSelector"]) == {thing["metadata"]["name"]}
    homes = {f"demo-{role}": f"demo-{group}" for group, roles in groups(things).items() for role in roles}
    for service in of_kind(things, "Service"):
        name = service["metadata"]["name"]
        assert taken(service["spec"]["selector"]) == {homes.get(name, name)}
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"] is True
    budgets = {
        thing["metadata"]["name"]: taken(thing["spec"]["selector"])
        for thing in of_kind(things, "PodDisruptionBudget")
    }
    assert budgets == {name: {name} for name in labels}
    lasting(things)
    callers(things, labels)


def lasting(things: list[Object]) -> None:
    """A budget lets one replica go at a time however many there are, and asks for none after the run: by itself
    if its workload can be scaled (a Job and a RayCluster cannot), else because the controller deletes it."""
    allowed = {thing["metadata"]["name"]: int(thing["kind"] == "Deployment") for thing in workloads(things)}
    specs = {thing["metadata"]["name"]: thing["spec"] for thing in of_kind(things, "PodDisruptionBudget")}
    fixed = {name: spec["minAvailable"] for name, spec in specs.items() if "maxUnavailable" not in spec}
    assert {name: spec["maxUnavailable"] for name, spec in specs.items() if name not in fixed} == allowed
    followers = {
        thing["metadata"]["name"]: thing["spec"]["workerGroupSpecs"][0]["numOfHosts"]
        for thing in of_kind(things, "RayCluster")
    }
    assert fixed == {"demo-controller": 1} | {name: 1 + hosts for name, hosts in followers.items()}
    (job,) = of_kind(things, "Job")
    deleted = {f"--scale-down=poddisruptionbudget/{name}" for name in fixed}
    assert deleted <= {*job["spec"]["template"]["spec"]["containers"][0]["args"]}
    (role,) = of_kind(things, "Role")
    (rule,) = [rule for rule in role["rules"] if rule["apiGroups"] == ["policy"]]
    assert ({*rule["resourceNames"]}, rule["verbs"]) == ({*fixed}, ["delete"])


def callers(things: list[Object], labels: dict[str, dict[str, str]]) -> None:
    """Only the controller calls a role; rollouts take weights from the actor and from one another. Who may be
    called by a pod may be reached by it, and no other pod of the job."""
    accepted, reached = (calls(things, labels, *way) for way in (("ingress", "from"), ("egress", "to")))
    rollouts = {name for name in labels if "rolemesh.dev/role-rollout" in labels[name]}
    senders = rollouts | {name for name in labels if "rolemesh.dev/role-actor" in labels[name]}
    for name in labels:
        expected = set() if name == "demo-controller" else {"demo-controller"}
        assert accepted[name] == expected | (rollouts if name in senders else set())
        assert reached[name] == {other for other in labels if name in accepted[other]}


def calls(
    things: list[Object], labels: dict[str, dict[str, str]], direction: str, peers: str
) -> dict[str, set[str]]:
    """Pod to the pods of this job that a policy lets it be called by, or call, for gRPC."""
    may: dict[str, set[str]] = {name: set() for name in labels}
    for policy in of_kind(things, "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for name in [n for n in labels if selects(policy["spec"]["podSelector"], labels[n])]:
            for rule in policy["spec"][direction]:
                if rule.get("ports") == [{"port": 50051}]:
                    given = [peer["podSelector"] for peer in rule[peers] if "podSelector" in peer]
                    may[name] |= {other for other in labels for peer in given if selects(peer, labels[other])}
    return may


def references(things: list[Object]) -> None:
    """What one object says of another is there."""
    names = {(thing["kind"], thing["metadata"]["name"]) for thing in things}
    (job,) = of_kind(things, "Job")
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    services = [arg.split(":")[1] for arg in args if ":demo-" in arg]
    assert {("Service", name) for name in services} <= names
    assert len(services) == len({role for roles in groups(things).values() for role in roles})
    for thing in of_kind(things, "StatefulSet"):
        assert ("Service", thing["spec"]["serviceName"]) in names
    for thing in of_kind(things, "ScaledObject"):
        [trigger] = thing["spec"]["triggers"]
        assert "authenticationRef" not in trigger  # /metrics is plain, under TLS too
        assert trigger["type"] == "metrics-api"  # known to KEDA before anybody answers
        assert trigger["metadata"]["url"] == "http://demo-controller.jobs:9090/metrics"
        assert ("Service", "demo-controller") in names
    for thing in of_kind(things, "HorizontalPodAutoscaler", "ScaledObject"):
        target = thing["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in names
    (role,) = of_kind(things, "Role")
    may = {
        (verb, rule["resources"][0], name)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [])
    }
    scalable = {(resource, name) for verb, resource, name in may if verb == "patch"}
    scales = {(f"{thing['kind'].lower()}s/scale", thing["metadata"]["name"]) for thing in workloads(things)}
    clusters = {("rayclusters", thing["metadata"]["name"]) for thing in of_kind(things, "RayCluster")}
    assert {(resource, name) for verb, resource, name in may if verb == "get"} == scales | clusters
    (test,) = (pod for pod in of_kind(things, "Pod") if pod["metadata"]["name"] == "demo-check")
    needed = [
        a.removeprefix("--need=") for a in test["spec"]["containers"][0]["args"] if a.startswith("--need=")
    ]
    asked = {(f"{kind}s/scale", name) for kind, name in (one.split("/") for one in needed)}
    assert asked == scales | {("rayclusters/scale", name) for _, name in clusters}
    down = [arg.removeprefix("--scale-down=").split("/") for arg in args if arg.startswith("--scale-down=")]
    down = [each for each in down if each[0] != "poddisruptionbudget"]  # see `lasting`
    told = {
        (kind.lower(), thing["metadata"]["name"])
        for thing in things
        if (kind := thing["kind"]) == "ScaledObject"
    }
    paused = {name for _, name in told}
    for thing in (*workloads(things), *heads(things)):
        if thing["metadata"]["name"] not in paused:
            told.add((thing["kind"].lower(), thing["metadata"]["name"]))
    assert {(kind, name) for kind, name in down} == told
    assert scalable == {
        (f"{kind}s" if kind in ("scaledobject", "raycluster") else f"{kind}s/scale", name)
        for kind, name in told
    }
    for pod in pods(things):
        for volume in pod["spec"]["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName", "")
            if claim.startswith("demo-"):
                assert ("PersistentVolumeClaim", claim) in names


@pytest.mark.parametrize("kind", ["Deployment", "NetworkPolicy", "PodMonitor", "ScaledObject", "Certificate"])
def test_a_misspelt_field_is_noticed(kind: str) -> None:
    """What is held above would be nothing if schemas took everything."""
    values = {"tls": {"mode": "certManager"}, "autoscaling": SCALERS["keda"]}
    for thing in of_kind(objects(values), kind):
        assert "misspelt" in schema_errors(json.dumps(thing | {"spec": thing["spec"] | {"misspelt": 1}}))


def test_helm_test_and_a_run_exclude_one_another(tmp_path: Path) -> None:
    """Each holds the lock in the workspace that the other one needs, from its first act to its last."""
    program, asked, go = tmp_path / "rolemesh", tmp_path / "asked", tmp_path / "go"
    program.write_text(f"#!/bin/sh\n[ $1 = data ] || {{ echo $2 >{asked}; cat {go}; }}\n")
    program.chmod(0o755)
    for fifo in (asked, go):
        os.mkfifo(fifo)
    things = objects({})
    [check] = [pod["spec"]["containers"][0] for pod in of_kind(things, "Pod")]
    [run] = [job["spec"]["template"]["spec"]["containers"][0] for job in of_kind(things, "Job")]
    overrides = {arg.partition(".")[0] for arg in check["args"] if re.match(r"[a-z]+\.[a-z_.]+=", arg)}
    assert overrides == {"data", "trainer"}  # a trial compares no fingerprint's key of these sections

    def begin(container: Object) -> subprocess.Popen[str]:
        command = [*container["command"], *container["args"]]
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        return subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)

    def is_free() -> bool:
        lock = ["flock", "--nonblock", ".jobs.demo-controller.lock", "true"]
        return not subprocess.run(lock, cwd=tmp_path).returncode

    for container in (run, check):
        with begin(container) as first:
            assert asked.read_text() == "--config=/etc/rolemesh/job.yaml\n"  # `rolemesh control` has begun
            assert not is_free()
            with begin(check) as second:
                assert "the job is active, and a test would disrupt its run" in second.communicate()[1]
            assert second.returncode == 1
            go.write_text("on")
        assert first.returncode == 0
        assert is_free()


def test_a_controller_that_waits_for_anothers_lock_is_not_killed() -> None:
    """It answers no probe until the other one has ended, which may take all of its grace."""
    [job] = of_kind(objects({"controller": {"graceSeconds": 3600}}), "Job")
    pod = job["spec"]["template"]["spec"]
    probe = pod["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > pod["terminationGracePeriodSeconds"] == 3600
