"""The cluster that KUBECONFIG points at, through kubectl and helm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from rendering import CHART, helm

from rolemesh.v1 import controller_pb2 as pb
from rolemesh.v1 import controller_pb2_grpc

REPOSITORY, _, TAG = os.environ.get("IMAGE", "localhost/rolemesh:0.1.0").rpartition(":")
IMAGE = f"{REPOSITORY}:{TAG}"
WITH_IMAGE = ("--set", f"image.repository={REPOSITORY},image.tag={TAG}")
# Accepted by the API server, admitted by Pod Security and quotas, and started by nobody.
UNSCHEDULED = ("--set", "pods.schedulerName=nobody")

LISTED_ANEW_S = 15.0  # a watch has missed a change for minutes

Object = dict[str, Any]


class Failed(Exception):
    """What a command said when it failed."""


def run(*command: str, stdin: str | None = None, within_s: float = 120) -> str:
    """A command's output.

    Raises:
        Failed: its words.
    """
    ended = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=within_s)
    if ended.returncode:
        raise Failed(f"{' '.join(command)}: {ended.stderr or ended.stdout}")
    return ended.stdout


def absence() -> str:
    """Why there is no cluster to test on; empty: there is one."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG is not set: point it at a cluster, e.g. one of kind"
    if not shutil.which("kubectl"):
        return "there is no kubectl"
    if not helm():
        return "there is no helm"
    try:
        run("kubectl", "get", "--raw", "/readyz", "--request-timeout=5s")
    except Failed as failed:
        return f"no cluster answers at {os.environ['KUBECONFIG']}: {failed}"
    return ""


def knows(definition: str) -> bool:
    """Whether the cluster has this custom resource definition, e.g. `rayclusters.ray.io`."""
    try:
        run("kubectl", "get", "crd", definition)
    except Failed as failed:
        if "NotFound" not in str(failed):
            raise
        return False
    return True


@dataclass(frozen=True)
class Namespace:
    """One namespace, and what is done in it."""

    name: str

    def kubectl(self, *args: str, stdin: str | None = None, within_s: float = 120) -> str:
        return run("kubectl", "-n", self.name, *args, stdin=stdin, within_s=within_s)

    def get(self, kinds: str, *args: str) -> list[Object]:
        found: list[Object] = json.loads(self.kubectl("get", kinds, "-o", "json", *args))["items"]
        return found

    def one(self, kind: str, name: str) -> Object:
        found: Object = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def helm(self, *args: str, stdin: str | None = None, within_s: float = 660) -> str:
        program = helm()
        assert program
        return run(program, "-n", self.name, *args, stdin=stdin, within_s=within_s)

    def install(self, release: str, *args: str, stdin: str | None = None) -> str:
        return self.helm("install", release, str(CHART), *WITH_IMAGE, *args, stdin=stdin)

    def until(self, holds: Callable[[Object], bool], *what: str, within_s: float = 120) -> Object:
        """An object of `kubectl get WHAT` once it is as asked for, now or later."""
        deadline, thing = time.monotonic() + within_s, Object()
        while (left_s := deadline - time.monotonic()) > 0:
            for thing in self._watch(*what, for_s=min(left_s, LISTED_ANEW_S)):
                if holds(thing):
                    return thing
        status = json.dumps(thing.get("status"), indent=1)
        said = [f"within {within_s} s, {' '.join(what)} was last {status}"]
        for question in (("get", "pods", "-o", "wide"), ("events",)):
            with suppress(Failed):
                said.append(self.kubectl(*question))
        raise AssertionError("\n".join(said))

    def _watch(self, *what: str, for_s: float) -> Iterator[Object]:
        """The objects of `kubectl get WHAT`, and each change of them."""
        command, text = ["kubectl", "-n", self.name, "get", *what, "--watch", "-o", "json"], ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout
            late = threading.Timer(for_s, watching.kill)
            late.start()
            try:
                for line in watching.stdout:
                    text += line
                    if line.rstrip() == "}":
                        yield json.loads(text)
                        text = ""
            finally:
                late.cancel()
                watching.kill()

    @contextmanager
    def following(self, pod: str, container: str, within_s: float = 120) -> Iterator[Iterator[str]]:
        """The lines of a container's log, from the first to the last, or until it is too late."""
        command = ["kubectl", "-n", self.name, "logs", "--follow", pod, "-c", container]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout
            late = threading.Timer(within_s, following.kill)
            late.start()
            try:
                yield following.stdout
            finally:
                late.cancel()
                following.kill()

    def pods(self, release: str, component: str | None = None) -> list[Object]:
        """Those that were not asked to go."""
        selector = f"app.kubernetes.io/instance={release}"
        if component:
            selector += f",app.kubernetes.io/component={component}"
        return [pod for pod in self.get("pods", "-l", selector) if "deletionTimestamp" not in pod["metadata"]]

    def metrics(self, pod: str) -> str:
        """What a pod's /metrics says, by way of the API server."""
        return self.kubectl("get", "--raw", f"/api/v1/namespaces/{self.name}/pods/{pod}:9090/proxy/metrics")

    @contextmanager
    def controller(self, pod: str) -> Iterator[controller_pb2_grpc.ControllerServiceStub]:
        """ControllerService of a controller's pod."""
        command = ["kubectl", "-n", self.name, "port-forward", f"pod/{pod}", ":50051"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forwarding:
            assert forwarding.stdout
            try:
                _, _, address = forwarding.stdout.readline().partition("Forwarding from ")
                with grpc.insecure_channel(address.partition(" ")[0]) as channel:
                    _until_ready(channel, forwarding, pod)
                    yield controller_pb2_grpc.ControllerServiceStub(channel)
            finally:
                forwarding.kill()

    def steps(self, pod: str) -> Iterator[int]:
        """The number of each step of the controller in the pod, as it is made."""
        with self.controller(pod) as service:
            for response in service.Watch(pb.WatchRequest(), timeout=600):
                yield response.record.step


def _until_ready(channel: grpc.Channel, forwarding: subprocess.Popen[str], pod: str) -> None:
    """Returns when the pod's server answers. Raises Failed if the pod ends before."""
    ready = grpc.channel_ready_future(channel)
    while forwarding.poll() is None:
        with suppress(grpc.FutureTimeoutError):
            ready.result(timeout=1)
            return
    ready.cancel()
    raise Failed(f"{pod} ended before its server answered")


def make_claim(namespace: Namespace, name: str, access_mode: str) -> None:
    """A PersistentVolumeClaim of the default class."""
    spec = {"accessModes": [access_mode], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
    namespace.kubectl("create", "-f", "-", stdin=json.dumps(claim))


@contextmanager
def new_namespace(enforced: str = "restricted") -> Iterator[Namespace]:
    """One in which this level of Pod Security is enforced; gone afterwards, with all that is in it."""
    name = f"rolemesh-{uuid.uuid4().hex[:8]}"
    run("kubectl", "create", "namespace", name)
    try:
        run("kubectl", "label", "namespace", name, f"pod-security.kubernetes.io/enforce={enforced}")
        yield Namespace(name)
    finally:
        run("kubectl", "delete", "namespace", name, "--wait=false")


def await_control_plane(within_s: float = 240) -> None:
    """Return once the controllers, the scheduler and the garbage collector have done a first piece of work.

    On a busy machine a new cluster's API server answers minutes before they do.
    """
    labels, spec = {"app": "first"}, {"containers": [{"name": "first", "image": "localhost/none:1"}]}
    selected = {"selector": {"matchLabels": labels}}
    template = {"template": {"metadata": {"labels": labels}, "spec": spec}}
    kinds: dict[str, Object] = {
        "Deployment": {"apiVersion": "apps/v1", "spec": selected | template},
        "StatefulSet": {"apiVersion": "apps/v1", "spec": selected | template | {"serviceName": "first"}},
        "Job": {"apiVersion": "batch/v1", "spec": {"template": {"spec": spec | {"restartPolicy": "Never"}}}},
    }
    items = [thing | {"kind": kind, "metadata": {"name": "first"}} for kind, thing in kinds.items()]

    def has_a_pod(workload: Object) -> bool:
        status = workload.get("status", {})
        return bool(status.get("replicas", status.get("active")) == 1)

    with new_namespace("privileged") as namespace:
        everything = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        namespace.kubectl("create", "-f", "-", stdin=everything)
        for kind in kinds:
            namespace.until(has_a_pod, kind.lower(), "first", within_s=within_s)
        if namespace.get("nodes"):
            namespace.until(lambda pod: "nodeName" in pod["spec"], "pods", within_s=within_s)
        namespace.kubectl("delete", "deployment", "first", "--cascade=foreground", within_s=within_s)


def claims_of_the_user(namespace: Namespace) -> None:
    """What the examples for GPUs expect to find."""
    for name in ("models", "data"):
        make_claim(namespace, name, "ReadWriteMany")
