"""How many pods an upgrade asks for, by what `lookup` finds: Helm asks a server as it would ask a cluster's."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml
from rendering import CHART, KUBERNETES, Object, helm, objects, of_kind

KINDS = {
    "apps/v1": {"Deployment": "deployments", "StatefulSet": "statefulsets"},
    "batch/v1": {"Job": "jobs"},
    "v1": {"ConfigMap": "configmaps", "Secret": "secrets", "PersistentVolumeClaim": "persistentvolumeclaims"},
}
REWARD = "/apis/apps/v1/namespaces/jobs/deployments/demo-reward"


@contextmanager
def answering(found: dict[str, Object]) -> Iterator[str]:
    """Serve the kinds of KINDS and what is found, by path; give the server's address."""
    for version, kinds in KINDS.items():
        resources = [
            {"name": name, "kind": kind, "namespaced": True, "verbs": ["get"]} for kind, name in kinds.items()
        ]
        listed = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        found[f"/apis/{version}" if "/" in version else f"/api/{version}"] = listed

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = found.get(self.path.partition("?")[0])
            self.send_response(200 if content else 404)
            self.send_header("content-type", "application/json")
            self.end_headers()
            absent = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}
            self.wfile.write(json.dumps(content or absent | {"code": 404}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def asked_for(values: Object, found: dict[str, Object]) -> Any:
    """The number of pods of the reward that an upgrade sends."""
    with answering(found) as address:
        command = [str(helm()), "template", "demo", str(CHART), "--namespace", "jobs", "--values", "-"]
        command += ["--kube-version", KUBERNETES, "--dry-run=server", "--kube-apiserver", address]
        own = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "HELM_"))}
        how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
        ran = subprocess.run(command, input=json.dumps(values), env=own | {"KUBECONFIG": os.devnull}, **how)
    assert not ran.returncode, ran.stderr
    [reward] = [
        thing
        for thing in of_kind(list(yaml.load_all(ran.stdout, Loader=yaml.CSafeLoader)), "Deployment")
        if thing["metadata"]["name"] == "demo-reward"
    ]
    return reward["spec"].get("replicas")


@pytest.mark.parametrize(
    ("live", "said", "asked", "has_job", "sent"),
    [
        (5, 1, 1, False, 5),  # the controller alone is another one: kubectl scale stays
        (5, 1, 1, True, 5),
        (5, 1, 2, False, 2),  # the upgrade says another number
        (5, 1, 2, True, 2),
        (0, 1, 1, False, 1),  # the run has ended, and this is another
        (0, 1, 1, True, 0),
    ],
)
def test_an_upgrade_keeps_what_kubectl_scale_has_set(
    live: int, said: int, asked: int, has_job: bool, sent: int
) -> None:
    values: Object = {"placement": {"replicas": {"reward": asked}}}
    [job] = of_kind(objects(values), "Job")
    found: dict[str, Object] = {
        REWARD: {
            "kind": "Deployment",
            "apiVersion": "apps/v1",
            "metadata": {"name": "demo-reward", "annotations": {"rolemesh.dev/replicas": str(said)}},
            "spec": {"replicas": live},
        }
    }
    if has_job:
        path = f"/apis/batch/v1/namespaces/jobs/jobs/{job['metadata']['name']}"
        found[path] = {"kind": "Job", "apiVersion": "batch/v1", "metadata": {"name": job["metadata"]["name"]}}
    assert asked_for(values, found) == sent
