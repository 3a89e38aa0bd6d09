"""Runs the same commands for a job on Kubernetes, in the controller's own pod, by `kubectl exec`.

There the controller is at 127.0.0.1 and the job's keys are mounted, so no port has to be forwarded and no key
copied. With a forwarded port, the user would need the keys (permission to read the Secret) and the same version
of this program. Instead, the user needs permission to list jobs and pods and to exec in the namespace.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import typer

from rolemesh.errors import InvalidConfig, RoleUnavailable

CONTROLLER = "127.0.0.1:50051"
CHART = "rlhf-job"
FAILED = 3  # exit code if the run has failed, as in services/command_line/controller_client.py
RETRY_S = 2.0
ATTEMPTS = 5  # failed execs in a row, in running pods, before giving up
PATIENCE_S = 120.0  # how long kubectl may fail, once it has worked
LONG_S = 2 * PATIENCE_S  # an exec that ran this long has followed the run, however it ended
INTERRUPTED = 130


@dataclass(frozen=True)
class Pod:
    """A running pod of the controller."""

    name: str
    tls_dir: str


@dataclass(frozen=True)
class PortForwardWait:
    """No controller runs now, but one may start."""

    why: str


class Silent(PortForwardWait):
    """kubectl fails: the API server may be restarted."""


@dataclass(frozen=True)
class Ended:
    """The job has ended: no controller will start any more."""

    failed: bool
    how: str


class Job:
    """A job on Kubernetes.

    Args:
        name: name of its Helm release.
        namespace: its namespace; "": the current one.
        context: context of the kubeconfig; "": the current one.
    """

    def __init__(self, name: str, namespace: str = "", context: str = "") -> None:
        self.name = name
        self._flags = [
            *([f"--namespace={namespace}"] if namespace else []),
            *([f"--context={context}"] if context else []),
        ]

    def once(self, command: str, *, as_json: bool = False) -> int:
        """Run `rolemesh COMMAND` in the controller's pod. Returns its exit code.

        If the job has ended, `status` prints how.

        Raises:
            RoleUnavailable: no controller runs.
            InvalidConfig: no such job, or no kubectl.
        """
        found = self.find()
        if isinstance(found, Pod):
            return self._exec(found, command, as_json)
        if isinstance(found, Ended) and command == "status":
            state = "failed" if found.failed else "finished"
            text = json.dumps({"job": self.name, "state": state}) if as_json else f"{self.name}: {found.how}"
            typer.echo(text)
            return FAILED if found.failed else 0
        raise RoleUnavailable(f"{self.name}: {found.how if isinstance(found, Ended) else found.why}")

    def watch(self, *, as_json: bool = False) -> int:
        """Follow the run from one controller pod to the next, until the job ends. Returns the exit code."""
        said = ""
        failures = 0
        heard = -math.inf
        while not isinstance(found := self._found_since(heard), Ended):
            if isinstance(found, Pod):
                began = time.monotonic()
                code = self._exec(found, "watch", as_json)
                worked = code in (0, FAILED) or time.monotonic() - began > LONG_S
                failures = 0 if worked else failures + 1
                if code == INTERRUPTED or failures == ATTEMPTS:
                    return code
            elif found.why != said:
                said = found.why
                typer.echo(f"{self.name}: {said}", err=True)
            if not isinstance(found, Silent):
                heard = time.monotonic()
            time.sleep(RETRY_S)
        typer.echo(f"{self.name}: {found.how}", err=True)
        return FAILED if found.failed else 0

    def _found_since(self, heard: float) -> Pod | PortForwardWait | Ended:
        """Find the controller's pod; Silent if kubectl fails, but did not PATIENCE_S before (`heard`)."""
        try:
            return self.find()
        except RoleUnavailable as error:
            if time.monotonic() - heard > PATIENCE_S:
                raise
            return Silent(str(error))

    def find(self) -> Pod | PortForwardWait | Ended:
        """Find the controller's pod, or the reason why none runs."""
        labels = {"name": CHART, "instance": self.name, "component": "controller"}
        selector = ",".join(f"app.kubernetes.io/{key}={value}" for key, value in labels.items())
        answer = subprocess.run(
            self._command("get", "jobs,pods", "--selector", selector, "--output=json"),
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            raise RoleUnavailable(f"kubectl: {answer.stderr.strip()}")
        items = json.loads(answer.stdout)["items"]
        jobs = [item for item in items if item["kind"] == "Job"]
        pods = sorted((item for item in items if item["kind"] == "Pod"), key=_made)
        if not jobs:
            raise InvalidConfig(
                f"no job {self.name!r} in this namespace: `helm list -A` shows releases, -n names a namespace"
            )
        running = [pod for pod in pods if _runs(pod)]
        if running:
            return Pod(running[-1]["metadata"]["name"], _tls_dir(running[-1]))
        ends = [_end(job) for job in jobs]
        if None not in ends:
            assert ends[-1] is not None
            return ends[-1]
        if all(job["spec"].get("suspend") for job in jobs):
            return PortForwardWait("the run is suspended (controller.suspend)")
        states = {pod["metadata"]["name"]: pod["status"].get("phase", "unknown") for pod in pods}
        begun = [f"{name} is {phase}" for name, phase in states.items() if phase != "Failed"]
        failed = [f"{name} failed (see its logs), and another pod will start" for name in states]
        return PortForwardWait(
            "no controller runs: " + ", ".join(begun or failed[-1:] or ["its pod is not created yet"])
        )

    def _exec(self, pod: Pod, command: str, as_json: bool) -> int:
        terminal = ["--stdin", "--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else []
        inner = ["rolemesh", command, CONTROLLER]
        inner += [f"--tls-dir={pod.tls_dir}"] if pod.tls_dir else []
        inner += ["--json"] if as_json else []
        arguments = self._command("exec", *terminal, pod.name, "--container=controller", "--", *inner)
        return subprocess.run(arguments, check=False).returncode

    def _command(self, verb: str, *arguments: str) -> list[str]:
        program = shutil.which("kubectl")
        if program is None:
            raise InvalidConfig(
                f"{self.name!r} is taken for a job on Kubernetes, but there is no kubectl on the PATH; for "
                "another run, give its run directory or its controller's host:port"
            )
        return [program, verb, *self._flags, *arguments]


def _made(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["creationTimestamp"])


def _runs(pod: dict[str, Any]) -> bool:
    statuses = pod["status"].get("containerStatuses", ())
    leaving = "deletionTimestamp" in pod["metadata"]
    return not leaving and any(s["name"] == "controller" and "running" in s["state"] for s in statuses)


def _tls_dir(pod: dict[str, Any]) -> str:
    arguments = [
        argument
        for container in pod["spec"]["containers"]
        if container["name"] == "controller"
        for argument in container.get("args", ())
    ]
    found = [argument.partition("=")[2] for argument in arguments if argument.startswith("--tls-dir=")]
    return found[0] if found else ""


def _end(job: dict[str, Any]) -> Ended | None:
    for condition in job["status"].get("conditions", ()):
        if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
            failed = condition["type"] == "Failed"
            why = f": {condition['message']}" if failed and condition.get("message") else ""
            return Ended(failed, f"the run has {'failed' if failed else 'ended'}{why}")
    return None
