"""A real API server tells who is there, and scales what is left of a run: by a service account's rights."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster import Failed, Namespace, run

from rolemesh.kubernetes import Expired, Forbidden, KubernetesApi
from rolemesh.rpc.calling.discovery import Endpoints
from rolemesh.services.controller.scale_down import PAUSED, scale_down, scale_up, workloads

pytestmark = pytest.mark.cluster

WATCH = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}


def may_patch(group: str, resource: str, *names: str) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "resourceNames": list(names), "verbs": ["patch"]}


def account(namespace: Namespace, directory: Path, *rules: dict[str, Any]) -> KubernetesApi:
    """The API server as a pod of a new account with these rights sees it."""
    rbac = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {"name": "job"}, "rules": list(rules)}
    namespace.kubectl("create", "serviceaccount", "job")
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(role))
    namespace.kubectl("create", "rolebinding", "job", "--role=job", f"--serviceaccount={namespace.name}:job")
    config = json.loads(run("kubectl", "config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    api = config["clusters"][0]["cluster"]
    (directory / "ca.crt").write_bytes(base64.b64decode(api["certificate-authority-data"]))
    (directory / "token").write_text(namespace.kubectl("create", "token", "job"))
    (directory / "namespace").write_text(namespace.name)
    return KubernetesApi(api["server"], directory)


def put(namespace: Namespace, name: str, *endpoints: dict[str, Any]) -> None:
    """An EndpointSlice of the Service `reward`."""
    metadata = {"name": name, "labels": {"kubernetes.io/service-name": "reward"}}
    part = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "grpc", "port": 50051}],
    }
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(part))


def endpoint(ip: str, **conditions: bool) -> dict[str, Any]:
    return {"addresses": [ip], "conditions": conditions}


async def test_a_watch_yields_the_replicas_as_their_endpoints_change(
    namespace: Namespace, tmp_path: Path
) -> None:
    cluster = account(namespace, tmp_path, WATCH)
    put(namespace, "reward-a", endpoint("10.9.0.1", ready=False))
    put(namespace, "other-a")
    watch = Endpoints("reward", 50051, cluster).watch()

    async def seen() -> Sequence[str]:
        async with asyncio.timeout(120):
            return sorted(await anext(watch))

    assert await seen() == ["10.9.0.1:50051"]
    put(namespace, "reward-a", endpoint("10.9.0.1", ready=True), endpoint("10.9.0.2", ready=True))
    assert await seen() == ["10.9.0.1:50051", "10.9.0.2:50051"]
    put(namespace, "reward-b", endpoint("10.9.0.3"))
    assert await seen() == ["10.9.0.1:50051", "10.9.0.2:50051", "10.9.0.3:50051"]
    put(namespace, "reward-a", endpoint("10.9.0.1", ready=True, terminating=True), endpoint("10.9.0.2"))
    assert await seen() == ["10.9.0.2:50051", "10.9.0.3:50051"]
    namespace.kubectl("delete", "endpointslice", "reward-a")
    assert await seen() == ["10.9.0.3:50051"]


async def test_a_version_that_the_server_has_forgotten_raises_expired(
    namespace: Namespace, tmp_path: Path
) -> None:
    # Of what is defined after a cluster's first moments, as custom resources are, it never knew version 1.
    watch_scalers = {"apiGroups": ["keda.sh"], "resources": ["scaledobjects"], "verbs": ["watch"]}
    cluster = account(namespace, tmp_path, watch_scalers)
    path = f"/apis/keda.sh/v1alpha1/namespaces/{namespace.name}/scaledobjects"
    with pytest.raises(Expired, match="too old resource version"):
        async for _ in cluster.watch(path, "", "1", 5):
            pass


async def test_without_the_right_to_watch_it_is_forbidden(namespace: Namespace, tmp_path: Path) -> None:
    cluster = account(namespace, tmp_path)
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace.name}/endpointslices"
    with pytest.raises(Forbidden, match=r"endpointslices.* is forbidden"):
        await cluster.list(path, "")


async def test_only_workloads_that_the_account_may_scale_go_to_zero(
    namespace: Namespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rights by name, as the chart gives them: a workload of the same namespace that is not the job's stays."""
    cluster = account(
        namespace,
        tmp_path,
        may_patch("apps", "deployments/scale", "mine", "gone"),
        may_patch("apps", "statefulsets/scale", "mine"),
        may_patch("keda.sh", "scaledobjects", "mine"),
    )
    for name in ("mine", "other"):
        namespace.kubectl("create", "deployment", name, "--image=localhost/none:1", "--replicas=2")
    [deployment] = [thing for thing in namespace.get("deployments") if thing["metadata"]["name"] == "mine"]
    stateful = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "mine"},
        "spec": {key: deployment["spec"][key] for key in ("replicas", "selector", "template")}
        | {"serviceName": "mine"},
    }
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(stateful))
    given = ["deployment/mine,statefulset/mine", "deployment/other", "deployment/gone"]
    if has_keda := "scaledobjects" in run("kubectl", "api-resources", "-o", "name"):
        target = {"scaleTargetRef": {"name": "mine"}, "triggers": [{"type": "cpu", "metadata": {"value": "1"}}]}
        scaled = {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": {"name": "mine"},
            "spec": target,
        }
        namespace.kubectl("apply", "-f", "-", stdin=json.dumps(scaled))
        given.append("scaledobject/mine")

    await scale_down(workloads(given), cluster)

    def replicas(kind: str, name: str) -> int:
        asked: int = namespace.one(kind, name)["spec"]["replicas"]
        return asked

    assert (replicas("deployment", "mine"), replicas("statefulset", "mine")) == (0, 0)
    assert replicas("deployment", "other") == 2
    if has_keda:
        assert namespace.one("scaledobject", "mine")["metadata"]["annotations"][PAUSED] == "0"
        await scale_up(workloads(given), cluster, sets_replicas=False)  # as the next run does
        assert PAUSED not in namespace.one("scaledobject", "mine")["metadata"]["annotations"]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [warning.split(":")[0] for warning in warnings] == [
        "could not scale down deployment other",
        "could not scale down deployment gone",
    ]
    assert "forbidden" in warnings[0]
    assert "not found" in warnings[1]
    by_hand = warnings[0].split("scale it by hand: ")[1]
    run(*by_hand.split())
    assert replicas("deployment", "other") == 0
    with pytest.raises(Failed, match="not found"):
        run(*warnings[1].split("scale it by hand: ")[1].split())
