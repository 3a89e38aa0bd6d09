"""With storage.singleNode all pods of a release are scheduled to one node, in whatever order they are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from rendering import CHART, Object, objects, of_kind, pods, selects
from test_two_releases import COMMANDS

GPU = "nvidia.com/gpu"
TAINT = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}


@dataclass(frozen=True)
class Node:
    name: str
    gpus: int = 0
    is_tainted: bool = False

    def admits(self, pod: Object) -> bool:
        """Whether the pod's selector, tolerations and GPUs let it run here. Nothing else runs here."""
        spec = pod["spec"]
        tolerated = TAINT in spec.get("tolerations", ())
        pool = spec.get("nodeSelector", {}).get("pool", self.name[:3])
        return gpus(pod) <= self.gpus and pool == self.name[:3] and (tolerated or not self.is_tainted)


NODES = (Node("cpu-0"), Node("gpu-0", 8, is_tainted=True), Node("cpu-1"), Node("gpu-1", 8, is_tainted=True))
Placed = frozenset[tuple[int, Node]]

ON_GPUS: Object = {"storage": {"singleNode": True}, "gpu": {"tolerations": [TAINT]}}
WHERE: dict[str, tuple[Any, Object]] = {
    "gpu-hybrid": ([CHART / "examples" / "gpu-hybrid.yaml"], {}),
    "four roles on GPUs": ([], ON_GPUS),
    "GPU nodes by a label": ([], ON_GPUS | {"gpu": {"tolerations": [TAINT], "nodeSelector": {"pool": "gpu"}}}),
    "a group of its own taint": ([], {"storage": {"singleNode": True}, "groups": {
        role: {"tolerations": [TAINT]} for role in ("actor", "critic", "rollout")}}),
    "no GPUs": ([CHART / "examples" / "tiny-split-collocate.yaml"], {"storage": {"singleNode": True}}),
}  # fmt: skip


def gpus(pod: Object) -> int:
    return sum(int(each["resources"].get("limits", {}).get(GPU, 0)) for each in pod["spec"]["containers"])


def fitting(pod: int, all_pods: list[Object], placed: Placed) -> Iterator[Node]:
    """The nodes that the scheduler may choose for a pod. Pods select others on their own node."""
    (term,) = all_pods[pod]["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"

    def matches(other: int) -> bool:
        return selects(term["labelSelector"], all_pods[other]["metadata"]["labels"])

    near = {node for other, node in placed if matches(other)}
    for node in NODES:
        taken = sum(gpus(all_pods[other]) for other, where in placed if where == node)
        is_first = not near and matches(pod)
        if (
            (node in near or is_first)
            and node.admits(all_pods[pod])
            and taken + gpus(all_pods[pod]) <= node.gpus
        ):
            yield node


def ends(all_pods: list[Object], placed: Placed, seen: set[Placed]) -> Iterator[Placed]:
    """Where pods may be when no other one can be scheduled, by every order and choice of the scheduler."""
    if placed in seen:
        return
    seen.add(placed)
    pending = set(range(len(all_pods))) - {pod for pod, _ in placed}
    steps = [placed | {(pod, node)} for pod in pending for node in fitting(pod, all_pods, placed)]
    if not steps:
        yield placed
    for step in steps:
        yield from ends(all_pods, step, seen)


@pytest.mark.parametrize(("files", "values"), WHERE.values(), ids=WHERE)
def test_all_pods_find_one_node_and_come_back_to_it(files: Any, values: Object) -> None:
    things = objects(values, files=files)
    running = [pod for pod in pods(things) if pod.get("kind") != "Pod"]
    assert len(running) > 2
    checks = {pod["metadata"]["name"]: pod for pod in of_kind(things, "Pod")}
    found = list(ends(running, frozenset(), set()))
    assert found
    for placed in found:
        assert len(placed) == len(running), "some pods are pending for ever"
        (node,) = {node for _, node in placed}
        for pod, _ in placed:
            assert [*fitting(pod, running, placed - {(pod, node)})] == [node]
        # `helm test` runs there, too
        check = checks["demo-check"]
        assert [*fitting(len(running), [*running, check], placed)] == [node]


@pytest.mark.parametrize(("files", "values"), WHERE.values(), ids=WHERE)
def test_helm_test_says_that_a_run_has_scaled_the_roles_down(files: Any, values: Object) -> None:
    """Where its pod follows those with GPUs, another comes first that follows nobody and mounts no claim."""
    things = objects(values, files=files)
    checks = {pod["metadata"]["name"]: pod for pod in of_kind(things, "Pod")}
    finds_a_node = bool([*fitting(0, [checks["demo-check"]], frozenset())])
    first = checks.get("demo-check-roles")
    assert finds_a_node == (first is None)
    if first is None:
        return
    assert first["metadata"]["annotations"]["helm.sh/hook-weight"] == "-1"
    spec = first["spec"]
    assert not spec.keys() & {"affinity", "nodeSelector", "initContainers"}
    # It would be pending itself if all nodes were tainted, or had no room for a controller.
    assert {node for node in NODES if node.admits(first)} == {*NODES}
    assert spec["tolerations"] == checks["demo-check"]["spec"]["tolerations"]
    [container] = spec["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "10m", "memory": "256Mi", "ephemeral-storage": "1Gi"},
        "limits": {"memory": "1Gi"},
    }
    volumes = {volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" not in volume}
    assert len(volumes) == len(spec["volumes"])
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    needed = [arg for arg in checks["demo-check"]["spec"]["containers"][0]["args"] if arg.startswith("--need=")]
    assert container["command"] == ["rolemesh", "need"]
    assert [f"--need={arg}" for arg in container["args"]] == needed != []
    assert COMMANDS["need"].make_context("need", [*container["args"]]).params["given"] == container["args"]


def test_the_pod_that_checks_the_roles_has_limits_for_a_quota() -> None:
    """A ResourceQuota may require a limit of every pod."""
    things = objects(ON_GPUS | {"controller": {"resources": {"limits": {"cpu": 8}}}})
    [first] = [pod for pod in of_kind(things, "Pod") if pod["metadata"]["name"] == "demo-check-roles"]
    assert first["spec"]["containers"][0]["resources"]["limits"] == {"cpu": 8, "memory": "1Gi"}


def test_without_single_node_pods_have_the_nodes_of_their_groups() -> None:
    values = ON_GPUS | {"storage": {"singleNode": False}}
    tolerating = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods(objects(values))
                  if "tolerations" in pod["spec"]}  # fmt: skip
    assert tolerating == {"actor", "critic", "rollout"}
    assert not any("affinity" in pod["spec"] for pod in pods(objects(values)))
