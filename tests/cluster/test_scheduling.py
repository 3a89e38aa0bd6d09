"""Many GPUs: pods are scheduled for real onto pretended nodes (KWOK), where nothing runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial

import pytest
from cluster import Namespace, Object, claims_of_the_user
from rendering import CHART

pytestmark = pytest.mark.cluster

GPU = "nvidia.com/gpu"
PER_NODE = 8
# 20 in each zone: pods of one GPU lie on at most 17 of them, and actor and critic find whole ones.
NODES = 40
REPLICAS = {"rollout": 8, "reward": 16, "reference": 1, "actor": 1, "critic": 1}
LARGE = str(CHART / "examples" / "gpu-standalone.yaml")
ZONE = "topology.kubernetes.io/zone"
# Beside a real node all goes to the pretended ones. Engines have a zone to themselves: a scheduler spreads what
# takes one GPU, and would leave few nodes whole.
PODS = {"nodeSelector": {"type": "kwok", ZONE: "zone-1"}, "tolerations": [{"key": GPU, "operator": "Exists"}]}
ENGINES = {"nodeSelector": {"type": "kwok", ZONE: "zone-0"}}


@pytest.fixture
def nodes(namespace: Namespace) -> dict[str, Object]:
    """The pretended ones, once they are ready."""
    if not namespace.get("nodes", "-l", "type=kwok"):
        pytest.skip(f"THE LARGE JOB IS NOT SCHEDULED: it takes {NODES} pretended nodes of 8 GPUs (KWOK)")
    ready: dict[str, Object] = {}

    def all_are_there(node: Object) -> bool:
        if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", [])):
            ready[node["metadata"]["name"]] = node
        return len(ready) >= NODES

    namespace.until(all_are_there, "nodes", "-l", "type=kwok", within_s=240)
    return ready


def gpus(pod: Object) -> int:
    return sum(int(c["resources"].get("limits", {}).get(GPU, 0)) for c in pod["spec"]["containers"])


def test_a_large_job_is_scheduled_as_its_values_say(namespace: Namespace, nodes: dict[str, Object]) -> None:
    claims_of_the_user(namespace)
    placed = json.dumps({"pods": PODS, "groups": {"rollout": ENGINES}})
    more = ("--set", "gang.scheduler=coscheduling,pods.schedulerName=default-scheduler")
    notes = namespace.install("job", "--values", LARGE, "--values", "-", *more, stdin=placed)
    for group, replicas in REPLICAS.items():
        kind = "statefulset" if group in ("actor", "critic") else "deployment"
        namespace.until(partial(_has, replicas), kind, f"job-{group}")
    # Not ready ones: a pod stays unready for good when its pretended node was once thought dead.
    pods = [
        namespace.until(lambda thing: bool(thing["spec"].get("nodeName")), "pod", pod["metadata"]["name"])
        for pod in namespace.pods("job")
        if "rolemesh.dev/group" in pod["metadata"]["labels"]
    ]
    assert Counter(map(group_of, pods)) == REPLICAS
    taken: Counter[str] = Counter()
    for pod in pods:
        node = nodes[pod["spec"]["nodeName"]]["metadata"]
        taken[node["name"]] += gpus(pod)
        assert node["labels"][ZONE] == ("zone-0" if group_of(pod) == "rollout" else "zone-1")
    assert max(taken.values()) <= PER_NODE
    said = re.search(r"It uses (\d+) GPUs", notes)
    assert said
    assert sum(taken.values()) == int(said[1])

    gang = namespace.one("podgroups.scheduling.x-k8s.io", "job-gang")
    assert gang["spec"]["minMember"] == len(pods)
    assert {pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] for pod in pods} == {"job-gang"}


def _has(replicas: int, workload: Object) -> bool:
    return bool(workload["status"].get("replicas") == replicas)


def group_of(pod: Object) -> str:
    group: str = pod["metadata"]["labels"]["rolemesh.dev/group"]
    return group
