"""A job that trains in a cluster, and the same job on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml
from cluster import IMAGE, WITH_IMAGE, Failed, Namespace, Object
from rendering import CHART, ROOT

from rolemesh.v1 import controller_pb2 as pb

RESULTS = Path(__file__).with_name("results.py").read_text()
TINY = "outputs/tiny"
SAVE_FREQ = 5
HERE = 25  # steps of the local run, about as many as the longest job makes; it has learnt by then
# A run of the cluster goes on until it is stopped: no test has to be faster than it. It keeps every checkpoint.
ENDLESS = "job.trainer.total_training_steps=100000,job.trainer.max_actor_ckpt_to_keep=1000"
# For a test that looks at rewards alone: two pods import torch where there would be five.
REWARD_ALONE = {
    "strategy": "custom",
    "groups": {"reward": ["reward"], "rest": ["actor", "critic", "reference", "rollout"]},
}

Outcome = dict[str, Any]


def train_here(directory: Path, *more: str) -> Outcome:
    """`make run` in another directory, all its checkpoints kept: what the job is to come to.

    What the commands print goes into `printed` in the directory: another test's output is captured meanwhile.

    Args:
        directory: for its files.
        more: job files and overrides.
    """
    rolemesh = [sys.executable, "-P", "-m", "rolemesh"]
    overrides = [f"trainer.total_training_steps={HERE}", *more, f"trainer.save_freq={SAVE_FREQ}"]
    overrides += ["trainer.max_actor_ckpt_to_keep=null"]
    for arguments in (["demo", TINY], ["run", str(ROOT / "configs" / "tiny.yaml"), *overrides]):
        with (directory / "printed").open("a") as printed:
            to_file = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": subprocess.STDOUT}
            ended = subprocess.run([*rolemesh, *arguments], cwd=directory, **to_file)
        assert ended.returncode == 0, (directory / "printed").read_text()
    command = [sys.executable, "-c", RESULTS, TINY]
    results = subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout
    outcome: Outcome = json.loads(results)
    return outcome


@dataclass(frozen=True)
class Job:
    """A release of the chart: the demo under a placement. Its workspace is a claim that others may share; the
    first one makes the model there."""

    namespace: Namespace
    strategy: str
    workspace: str
    name: str

    @property
    def values(self) -> tuple[str, ...]:
        file = CHART / "examples" / f"tiny-{self.strategy}.yaml"
        saves = f"job.trainer.default_local_dir={self.run_dir},job.trainer.save_freq={SAVE_FREQ}"
        claim = f"storage.workspace.existingClaim={self.workspace}"
        return ("--values", str(file), "--set", saves, "--set", ENDLESS, "--set", claim)

    @property
    def run_dir(self) -> str:
        return f"outputs/{self.name}"

    @property
    def selector(self) -> tuple[str, str]:
        return ("-l", f"app.kubernetes.io/instance={self.name}")

    def install(self, *more: str, stdin: str | None = None) -> None:
        self.namespace.install(self.name, *self.values, *more, stdin=stdin)

    def upgrade(self, *more: str, chart: Path = CHART, stdin: str | None = None) -> None:
        self.namespace.helm("upgrade", self.name, str(chart), *WITH_IMAGE, *self.values, *more, stdin=stdin)

    def controller(self) -> str:
        """The controller's pod, once its process runs. There may be one before it that has not yet ended."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=controller"
        pod = self.namespace.until(runs, "pods", "-l", selector, within_s=600)
        name: str = pod["metadata"]["name"]
        return name

    def steps(self) -> Iterator[int]:
        """The number of each step, those already made first, as whichever controller is there tells it."""
        while True:
            try:
                yield from self.namespace.steps(self.controller())
                return
            except (grpc.RpcError, Failed):  # the controller is gone; the Job starts the next one
                continue

    def step(self) -> int:
        """The last one that has been made."""
        with self.namespace.controller(self.controller()) as service:
            step: int = service.GetStatus(pb.GetStatusRequest(), timeout=60).step
            return step

    def stop(self) -> None:
        """The running step is the last."""
        with self.namespace.controller(self.controller()) as service:
            service.Stop(pb.StopRequest(), timeout=60)

    def goes_on_from(self) -> int:
        """The step of the checkpoint that the controller began with; 0: with none."""
        pod = self.controller()
        next(self.namespace.steps(pod))  # it has begun
        said = re.search(
            r"resuming from \S*global_step_(\d+)", self.namespace.kubectl("logs", pod, "-c", "controller")
        )
        return int(said[1]) if said else 0

    def reach(self, step: int) -> None:
        """Returns when the step has been made."""
        while all(made < step for made in self.steps()):  # a controller that lost a role has ended well, too
            (job,) = self.namespace.get("jobs", *self.selector)
            assert not ended(job), f"the run ended before step {step}"

    def end(self, within_s: float = 600) -> None:
        """Returns when the run has ended well, its roles' pods were asked to go, and no budget misses them."""
        job = self.namespace.until(ended, "jobs", *self.selector, within_s=within_s)
        assert job["status"].get("succeeded") == 1, job["status"]
        self.is_scaled_down()

    def is_scaled_down(self) -> None:
        """Nothing holds a GPU, and Prometheus' alert on budgets (fewer healthy pods than desired) is quiet."""
        workloads = self.namespace.get("deployments,statefulsets", *self.selector)
        assert {workload["spec"]["replicas"] for workload in workloads} <= {0}
        budgets = {thing["metadata"]["name"] for thing in self.namespace.get("pdb", *self.selector)}
        assert budgets == {workload["metadata"]["name"] for workload in workloads}
        for name in budgets:
            self.namespace.until(_misses_nothing, "pdb", name)

    def outcome(self) -> Outcome:
        """What is in the workspace, read by a pod of the same image."""
        namespace = self.namespace
        namespace.kubectl("create", "-f", "-", stdin=json.dumps(reader(self.workspace, self.run_dir)))
        pod = namespace.until(
            lambda pod: pod["status"].get("phase") in ("Succeeded", "Failed"), "pod", "reader"
        )
        printed = namespace.kubectl("logs", "reader")
        assert pod["status"]["phase"] == "Succeeded", printed
        namespace.kubectl("delete", "pod", "reader")
        outcome: Outcome = json.loads(printed)
        return outcome


def runs(pod: Object) -> bool:
    """Its process answers, and it was not asked to go."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return "deletionTimestamp" not in pod["metadata"] and any(status.get("started") for status in statuses)


def _misses_nothing(budget: Object) -> bool:
    status = budget.get("status", {})
    return (status.get("expectedPods"), status.get("desiredHealthy")) == (0, 0)


def ended(job: Object) -> bool:
    """Well or not."""
    conditions = job.get("status", {}).get("conditions", [])
    return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)


def reader(claim: str, run_dir: str) -> Object:
    """A pod that prints what a run in the claim has left."""
    spec = f"""
      restartPolicy: Never
      automountServiceAccountToken: false
      securityContext:
        {{runAsNonRoot: true, runAsUser: 1000, fsGroup: 1000, seccompProfile: {{type: RuntimeDefault}}}}
      containers:
        - name: reader
          image: {IMAGE}
          command: [python, -c, {json.dumps(RESULTS)}, {run_dir}]
          workingDir: /workspace
          securityContext:
            {{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {{drop: [ALL]}}}}
          volumeMounts: [{{name: workspace, mountPath: /workspace, readOnly: true}}]
      volumes: [{{name: workspace, persistentVolumeClaim: {{claimName: {claim}}}}}]
    """
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "reader"}, "spec": yaml.safe_load(spec)}


# A judge that takes its time: a hundredth of a second for each row.
BUSY = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    ends = time.thread_time() + 0.01
    while time.thread_time() < ends:
        pass
    return float(solution_str.endswith(ground_truth))
"""
