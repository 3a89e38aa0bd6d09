"""Many GPUs: pods are scheduled for real onto pretended nodes (KWOK), where nothing runs."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from cluster import Namespace, Object
from rendering import CHART
from test_releases import claims_of_the_user

pytestmark = pytest.mark.cluster

GPU = "nvidia.com/gpu"
PER_NODE = 8
LARGE = str(CHART / "examples" / "gpu-standalone.yaml")
# Beside a real node: everything goes to the pretended ones.
PRETENDED = '{"nodeSelector": {"type": "kwok"}, "tolerations": [{"operator": "Exists"}]}'


@pytest.fixture
def nodes(namespace: Namespace) -> dict[str, Object]:
    """The pretended ones, at least as many as the example needs."""
    found = {node["metadata"]["name"]: node for node in namespace.get("nodes", "-l", "type=kwok")}
    if len(found) < 11:
        pytest.skip(
            f"THE LARGE JOB IS NOT SCHEDULED: it takes 11 pretended nodes of 8 GPUs, and there are {len(found)}"
        )
    return found


def gpus(pod: Object) -> int:
    return sum(int(c["resources"].get("limits", {}).get(GPU, 0)) for c in pod["spec"]["containers"])


def test_a_large_job_is_scheduled_as_its_values_say(namespace: Namespace, nodes: dict[str, Object]) -> None:
    claims_of_the_user(namespace, ("models", "data"))
    values = ("--set-json", f"pods={PRETENDED}", "--set", "gang.scheduler=coscheduling")
    notes = namespace.install("job", "--values", LARGE, *values)
    for group, replicas in {"rollout": 8, "reward": 16, "reference": 1, "actor": 1, "critic": 1}.items():
        kind = "statefulset" if group in ("actor", "critic") else "deployment"
        count = replicas
        namespace.until(
            lambda thing, count=count: thing["status"].get("readyReplicas") == count, kind, f"job-{group}"
        )

    pods = [pod for pod in namespace.pods("job") if pod["metadata"]["labels"].get("rolemesh.dev/group")]
    assert Counter(pod["metadata"]["labels"]["rolemesh.dev/group"] for pod in pods) == {
        "rollout": 8, "reward": 16, "reference": 1, "actor": 1, "critic": 1,
    }  # fmt: skip
    taken: Counter[str] = Counter()
    for pod in pods:
        assert pod["spec"]["nodeName"] in nodes
        taken[pod["spec"]["nodeName"]] += gpus(pod)
    assert max(taken.values()) <= PER_NODE
    said = re.search(r"It takes (\d+) GPUs", notes)
    assert said
    assert sum(taken.values()) == int(said[1])

    judges = [
        pod["spec"]["nodeName"] for pod in pods if pod["metadata"]["labels"]["rolemesh.dev/group"] == "reward"
    ]
    assert len(set(judges)) > 1  # spread, where the engines leave room
    gang = namespace.one("podgroups.scheduling.x-k8s.io", "job-gang")
    assert gang["spec"]["minMember"] == len(pods)
    assert {pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] for pod in pods} == {"job-gang"}
