"""Groups of several ranks: in one pod as many as its GPUs, in several pods by KubeRay."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from rendering import APIS, Object, objects, of_kind, pods, refusal, selects, workloads

ONE_POD: Object = {"placement": {"ranks": {"actor": 8}}, "roles": {"actor": {"gpus": 8}}}
TWO_PODS: Object = {"placement": {"ranks": {"actor": 16}}, "roles": {"actor": {"gpus": 16}}}
KUBERAY = "ray.io/v1/RayCluster"


def actors(values: Object, **how: Any) -> list[Object]:
    """The actor's pod templates."""
    return [pod for pod in pods(objects(values, **how)) if component(pod) == "actor"]


def component(pod: Object) -> str:
    label: str = pod["metadata"]["labels"]["app.kubernetes.io/component"]
    return label


def test_a_group_that_fits_into_one_pod_needs_no_kuberay() -> None:
    things = objects(ONE_POD, apis=[api for api in APIS if api != KUBERAY])
    (actor,) = (thing for thing in workloads(things) if thing["metadata"]["name"] == "demo-actor")
    assert (actor["kind"], actor["spec"]["replicas"]) == ("StatefulSet", 1)
    (container,) = actor["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["rolemesh"]
    assert container["args"][:2] == ["serve", "actor"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert [ports["metrics"], *(ports[f"metrics-{rank}"] for rank in range(1, 8))] == [*range(9090, 9098)]
    # four CPUs for eight ranks
    assert {"name": "OMP_NUM_THREADS", "value": "1"} in container["env"]
    (job,) = (thing for thing in of_kind(things, "ConfigMap") if thing["metadata"]["name"] == "demo-job")
    assert "ranks:\n    actor: 8" in job["data"]["job.yaml"]


@pytest.mark.parametrize(("strategy", "group"), [("hybrid", "policy"), ("collocate", "all")])
def test_ranks_of_a_group_that_generates_have_an_engine_each(strategy: str, group: str) -> None:
    roles = {role: {"gpus": 8} for role in ("actor", "rollout")}
    placement = {"strategy": strategy, "ranks": {group: 8}}
    (pod,) = [pod for pod in pods(objects({"placement": placement, "roles": roles})) if component(pod) == group]
    (container,) = pod["spec"]["containers"]
    assert "rollout" in container["args"][1].split(",")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_a_larger_group_is_a_ray_cluster_with_one_pod_per_node() -> None:
    """It has one service."""
    things = objects(TWO_PODS)
    (cluster,) = of_kind(things, "RayCluster")
    spec = cluster["spec"]
    (followers,) = spec["workerGroupSpecs"]
    assert (followers["replicas"], followers["numOfHosts"]) == (1, 1)
    for group in (spec["headGroupSpec"], followers):
        assert (group["rayStartParams"]["num-cpus"], group["rayStartParams"]["num-gpus"]) == ("8", "8")
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        # the operator adds probes that need wget and a dashboard, where there are none
        assert {"livenessProbe", "readinessProbe"} <= container.keys()
    head, follower = actors(TWO_PODS)
    assert head["spec"]["containers"][0]["args"][-1] == "placement.launcher=ray"
    (service,) = (thing for thing in of_kind(things, "Service") if thing["metadata"]["name"] == "demo-actor")
    labels = [pod["metadata"]["labels"] for pod in (head, follower)]
    assert [service["spec"]["selector"].items() <= each.items() for each in labels] == [True, False]
    assert spec["authOptions"] == {"mode": "token"}
    budgets = {thing["metadata"]["name"]: thing["spec"] for thing in of_kind(things, "PodDisruptionBudget")}
    assert (
        budgets["demo-actor"]["minAvailable"] == 2
    )  # of both, and the controller deletes it (test_rendering.py)


async def test_the_ray_head_restarts_only_if_rank_0_exists_and_hangs() -> None:
    (container,) = actors(TWO_PODS)[0]["spec"]["containers"]
    python, flag, program = container["livenessProbe"]["exec"]["command"]
    assert (python, flag) == ("python", "-c")
    servicer, server = health.aio.HealthServicer(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("localhost:0")
    here = program.replace("localhost:50052", f"localhost:{port}")
    assert here != program

    async def code() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, flag, here)
        return await process.wait()

    await server.start()
    await servicer.set("live", HealthCheckResponse.SERVING)
    codes = [await code()]
    await servicer.set("live", HealthCheckResponse.NOT_SERVING)
    codes.append(await code())
    await server.stop(None)
    assert [*codes, await code()] == [0, 1, 0]


def test_pods_by_hand_divide_ranks_without_gpus() -> None:
    on_cpus: Object = {role: {"gpus": 0} for role in ("actor", "critic", "reference", "rollout")}
    values = {
        "image": {"kind": "cpu"},
        "placement": {"ranks": {"actor": 6}},
        "groups": {"actor": {"pods": 3}},
        "roles": on_cpus,
    }
    (cluster,) = of_kind(objects(values), "RayCluster")
    assert cluster["spec"]["workerGroupSpecs"][0]["numOfHosts"] == 2
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "2"


def test_without_kuberay_a_group_of_several_pods_is_refused() -> None:
    words = (
        "group actor has 16 ranks in 2 pods, but the cluster does not know ray.io/v1/RayCluster: install "
        "KubeRay, or lower placement.ranks.actor to what one pod holds"
    )
    assert refusal(TWO_PODS, apis=[api for api in APIS if api != KUBERAY]) == words


def test_only_pods_of_one_group_reach_each_other_on_any_tcp_port() -> None:
    peers = {"podSelector": {"matchLabels": {
        "app.kubernetes.io/name": "rlhf-job", "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": "actor",
    }}}  # fmt: skip
    policies = {
        thing["metadata"]["name"]: thing["spec"] for thing in of_kind(objects(TWO_PODS), "NetworkPolicy")
    }
    any_tcp = [{"protocol": "TCP"}]
    assert {"from": [peers], "ports": any_tcp} in policies["demo-actor"]["ingress"]
    assert {"to": [peers], "ports": any_tcp} in policies["demo-actor"]["egress"]
    for name, spec in policies.items():
        rules = [rule for rule in (*spec["ingress"], *spec["egress"]) if rule.get("ports") == any_tcp]
        assert len(rules) == (2 if name == "demo-actor" else 0)


def test_rollouts_reach_the_weights_of_every_pod_of_the_actor() -> None:
    """A follower's pod has no label of a role, or the role's Service would lead to it."""
    things = objects(TWO_PODS)
    head, follower = (pod["metadata"]["labels"] for pod in actors(TWO_PODS))
    (rollout,) = (pod["metadata"]["labels"] for pod in pods(things) if component(pod) == "rollout")
    (reward,) = (pod["metadata"]["labels"] for pod in pods(things) if component(pod) == "reward")
    policies = [thing["spec"] for thing in of_kind(things, "NetworkPolicy")]

    def may(direction: str, peers: str, of: Object, other: Object) -> bool:
        rules = [
            rule for spec in policies if selects(spec["podSelector"], of) for rule in spec[direction]
            if rule.get("ports") == [{"port": 50051}]
        ]  # fmt: skip
        return any(selects(peer["podSelector"], other) for rule in rules for peer in rule[peers])

    assert "rolemesh.dev/role-actor" not in follower
    for actor in (head, follower):
        assert may("egress", "to", rollout, actor)
        assert may("ingress", "from", actor, rollout)
        assert not may("ingress", "from", actor, reward)
        assert not may("egress", "to", reward, actor)


def test_ray_pods_are_restricted_and_have_keys_and_a_gang() -> None:
    """Keys and gang are the job's."""
    in_queue = {"scheduler": "kueue", "queue": "lab"}
    for pod in actors(TWO_PODS | {"gang": in_queue}):
        said = {**pod["metadata"]["labels"], **pod["metadata"]["annotations"]}
        assert (said["kueue.x-k8s.io/queue-name"], said["kueue.x-k8s.io/pod-group-name"]) == (
            "lab",
            "demo-gang",
        )
        assert said["kueue.x-k8s.io/pod-group-total-count"] == "3"  # two of the actor, and the critic
    values = TWO_PODS | {"tls": {"mode": "certManager"}, "gang": {"scheduler": "volcano"}}
    for pod in actors(values):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert "demo-actor-tls" in [v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v]
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "demo-gang"
        assert pod["spec"]["schedulerName"] == "volcano"
    (gang,) = of_kind(objects(values), "PodGroup")
    assert gang["spec"]["minMember"] == 5  # two of the actor, and critic, reward, rollout


def test_the_controller_may_suspend_its_own_ray_cluster_only() -> None:
    """`helm test` waits for the cluster."""
    things = objects(TWO_PODS)
    (job,) = of_kind(things, "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "--scale-down=raycluster/demo-actor" in container["args"]
    (test,) = of_kind(things, "Pod")  # of `helm test`
    assert "--need=raycluster/demo-actor" in test["spec"]["containers"][0]["args"]
    for asking in (container, test["spec"]["containers"][0]):
        assert "--actor=kubernetes:demo-actor:50051" in asking["args"]
    (role,) = of_kind(things, "Role")
    (rule,) = (rule for rule in role["rules"] if rule["apiGroups"] == ["ray.io"])
    assert rule["resourceNames"] == ["demo-actor"]
    assert rule["verbs"] == ["get", "patch"]
