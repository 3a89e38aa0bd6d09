"""The demo in a cluster, under Pod Security `restricted`: it learns, whatever comes and goes, and ends with the
weights of `make run`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from cluster import WITH_IMAGE, Failed, Namespace, run
from rendering import CHART, KUBERNETES
from training import HERE, SAVE_FREQ, Job, Outcome, ended, runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]

GRACE = ("--set", "groups.rollout.graceSeconds=40")
SCALES_UP = ("--set", "controller.scaleUp=true")


def equal(outcome: Outcome, expected: Outcome, step: int) -> None:
    """Every metric of every step up to this one, and its checkpoint, byte for byte."""
    records, local = (
        [record for record in o["records"] if record["training/global_step"] <= step]
        for o in (outcome, expected)
    )
    assert records == local
    written, wanted = (o["checkpoints"][f"global_step_{step}"] for o in (outcome, expected))
    assert {"actor/model.safetensors", "critic/model.safetensors"} <= wanted.keys()
    assert written == wanted


def test_a_run_with_scaling_and_dying_pods_equals_a_local_one(
    workspace: tuple[Namespace, str], expected: Future[Outcome], tmp_path: Path
) -> None:
    """It ends with the bits of a local run."""
    namespace, claim = workspace
    job = Job(namespace, "standalone", claim, "rlhf-job")
    job.install(*GRACE)
    job.reach(1)
    reward_scales_to_three_and_back(job)
    a_new_dashboard_restarts_nothing(job, tmp_path)
    a_budget_keeps_the_actor(job)
    a_rollout_that_is_drained_finishes_its_rows(job)
    for component in ("reward", "rollout"):  # at once: their pods begin side by side
        kill(job, component)
    job.reach(max(job.step() + 2, SAVE_FREQ + 3))  # a checkpoint is written behind the next steps
    kill(job, "controller")
    began_at = job.goes_on_from()
    assert began_at >= SAVE_FREQ
    job.reach((began_at // SAVE_FREQ + 1) * SAVE_FREQ + 1)
    job.stop()
    job.end()
    outcome = job.outcome()
    made = int(outcome["records"][-1]["training/global_step"])
    equal(outcome, expected.result(), min(made, HERE) // SAVE_FREQ * SAVE_FREQ)


def test_the_local_run_that_the_others_equal_learns(expected: Future[Outcome]) -> None:
    records = expected.result()["records"]
    validated = [value for record in records for key, value in record.items() if "val-core/" in key]
    assert records[-1]["training/global_step"] == HERE
    assert validated[0] < 0.4 < 0.6 < validated[-1]


def kill(job: Job, component: str) -> None:
    """Its pod and the process in it, without a word of warning."""
    (pod,) = job.namespace.pods(job.name, component)
    job.namespace.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0")


def reward_scales_to_three_and_back(job: Job) -> None:
    """In the middle of the run each new replica scores rows as soon as it is ready."""
    namespace = job.namespace
    namespace.kubectl("scale", "deployment", f"{job.name}-reward", "--replicas=3")
    for _ in job.steps():  # the clock
        pods = [pod["metadata"]["name"] for pod in namespace.pods(job.name, "reward")]
        if len(pods) == 3 and all(num_scored(namespace, pod) for pod in pods):
            break
    else:
        raise AssertionError("the run ended before each of three reward pods had scored anything")
    namespace.kubectl("scale", "deployment", f"{job.name}-reward", "--replicas=1")
    gone = ("-l", f"app.kubernetes.io/instance={job.name},app.kubernetes.io/component=reward")
    namespace.until(lambda thing: thing["status"].get("replicas") == 1, "deployments", *gone)
    job.reach(job.step() + 1)


def num_scored(namespace: Namespace, pod: str) -> float:
    """Calls of ComputeScores that a reward pod has answered; 0 while it does not listen."""
    try:
        text = namespace.metrics(pod)
    except Failed:
        return 0
    answered = re.findall(
        r'^rolemesh_rpc_server_requests_total\{.*method="ComputeScores".*\} (.+)$', text, re.M
    )
    return sum(map(float, answered))


def a_new_dashboard_restarts_nothing(job: Job, tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "chart")
    (chart / "dashboards").mkdir(exist_ok=True)
    (chart / "dashboards" / "mine.json").write_text('{"title": "mine", "panels": []}')
    before = running(job)
    job.upgrade(*GRACE, chart=chart)
    assert job.namespace.one("configmap", f"{job.name}-dashboard-mine")
    assert running(job) == before


def running(job: Job) -> dict[str, object]:
    """Pods, and how often what stands above them was changed; less those that are on their way out."""
    things = job.namespace.get(
        "pods,deployments,statefulsets,jobs", "-l", f"app.kubernetes.io/instance={job.name}"
    )
    metadata = [thing["metadata"] for thing in things if "deletionTimestamp" not in thing["metadata"]]
    return {thing["uid"]: thing.get("generation") for thing in metadata}


def evict(job: Job, pod: str) -> None:
    """As a node that is drained asks for it."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{job.namespace.name}/pods/{pod}/eviction"
    job.namespace.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))


def a_budget_keeps_the_actor(job: Job) -> None:
    """A node that is drained waits for what would end the run."""
    with pytest.raises(Failed, match="disruption budget"):
        evict(job, f"{job.name}-actor-0")


def a_rollout_that_is_drained_finishes_its_rows(job: Job) -> None:
    """Within its grace period. Another pod generates the next ones, and the bits of the run stay the same."""
    allowed = ("poddisruptionbudget", f"{job.name}-rollout")
    job.namespace.until(lambda budget: budget["status"].get("disruptionsAllowed") == 1, *allowed)
    (pod,) = job.namespace.pods(job.name, "rollout")
    assert pod["spec"]["terminationGracePeriodSeconds"] == 40
    with job.namespace.following(pod["metadata"]["name"], "roles") as lines:
        next(lines)
        evict(job, pod["metadata"]["name"])
        said = "".join(lines)
    assert "draining: got SIGTERM" in said
    assert "cancelling calls" not in said


def test_a_collocated_run_has_the_bits_of_a_local_one(
    workspace: tuple[Namespace, str], expected: Future[Outcome]
) -> None:
    """`helm test` passes before it begins."""
    job = begun_after_its_check(workspace, "collocate", *SCALES_UP)
    has_the_bits(job, expected)
    manifests_that_are_applied_again_start_nothing_until_the_job_is_deleted(job)


def test_a_hybrid_run_that_is_paused_has_the_bits_of_a_local_one(
    workspace: tuple[Namespace, str], expected: Future[Outcome]
) -> None:
    namespace, _ = workspace
    job = begun_after_its_check(workspace, "hybrid")
    rolemesh("pause", job)
    told = json.loads(rolemesh("status", job, "--json"))
    assert told["state"] in ("running", "paused")  # the running step ends first
    assert told["step"] >= 1
    assert set(told["roles"]) == {"actor", "rollout", "reward", "critic", "reference"}
    with pytest.raises(Failed):  # it would spoil the run
        namespace.helm("test", job.name, "--timeout=1m")
    rolemesh("resume", job)
    began_at = a_new_controller_waits_for_pods_of_its_own_job(job)
    has_the_bits(job, expected, (began_at // SAVE_FREQ + 1) * SAVE_FREQ)
    with pytest.raises(Failed):  # the roles are gone, and the pod that stays says so
        namespace.helm("test", job.name, "--timeout=5m")
    [check] = namespace.one("pod", f"{job.name}-check")["status"]["containerStatuses"]
    assert "the roles are scaled to zero" in check["state"]["terminated"]["message"]


def begun_after_its_check(workspace: tuple[Namespace, str], strategy: str, *values: str) -> Job:
    """A job that has made its first step, after `helm test` had found its roles ready."""
    namespace, claim = workspace
    job = Job(namespace, strategy, claim, strategy)
    job.install(*values, "--set", "controller.suspend=true")
    namespace.helm("test", job.name, "--timeout=10m")
    job.upgrade(*values)
    job.reach(1)
    return job


def has_the_bits(job: Job, expected: Future[Outcome], step: int = SAVE_FREQ) -> None:
    """Stops the job when it has written the checkpoint of this step, and compares that with the local run's."""
    job.reach(step + 1)
    job.stop()
    job.end()
    equal(job.outcome(), expected.result(), step)


def a_new_controller_waits_for_pods_of_its_own_job(job: Job) -> int:
    """An upgrade of all pods in mid-run, of which one keeps its old job for a while.

    Returns:
        The step from which the run goes on.
    """
    namespace, old = job.namespace, f"{job.name}-scoring"

    def restart_from(ordinal: int) -> None:
        strategy = {"spec": {"updateStrategy": {"rollingUpdate": {"partition": ordinal}}}}
        namespace.kubectl("patch", "statefulset", old, "--patch", json.dumps(strategy))

    restart_from(1)  # which it has not
    job.upgrade("--set", "job.reward.num_workers=1")
    (made,) = namespace.get("jobs", *job.selector)
    of_job = f"batch.kubernetes.io/job-name={made['metadata']['name']}"
    pod = namespace.until(runs, "pods", "-l", of_job, within_s=300)["metadata"]["name"]
    with namespace.following(pod, "controller") as lines:
        other = "was started with another job, which differs in reward.num_workers"
        assert any(other in line for line in lines)
    restart_from(0)
    return job.goes_on_from()


def manifests_that_are_applied_again_start_nothing_until_the_job_is_deleted(job: Job) -> None:
    """As Argo CD and Flux apply them. The number of pods is the controller's, at both ends of a run."""
    namespace, name = job.namespace, job.name
    values = (*WITH_IMAGE, *job.values, *SCALES_UP)
    rendered = namespace.helm(
        "template", name, str(CHART), *values, "--skip-tests", "--kube-version", KUBERNETES
    )
    jobs = [made["metadata"]["uid"] for made in namespace.get("jobs", *job.selector)]
    for _ in range(2):
        namespace.kubectl("apply", "-f", "-", stdin=rendered)
        job.is_scaled_down()
        assert [made["metadata"]["uid"] for made in namespace.get("jobs", *job.selector)] == jobs
    namespace.kubectl("delete", "jobs", *job.selector)
    namespace.kubectl("apply", "-f", "-", stdin=rendered)
    namespace.until(lambda thing: thing["spec"]["replicas"] == 1, "statefulset", f"{name}-all", within_s=300)
    namespace.helm("uninstall", name)


def test_a_run_that_cannot_be_prepared_ends_and_frees_its_pods(namespace: Namespace) -> None:
    """A failure is counted (75) and tried again. After as many as allowed (3) no controller has begun."""
    failing = {
        "prepare": [{"creates": "outputs/never", "command": ["false"]}],
        "controller": {"maxAttempts": 1},
    }
    collocated = str(CHART / "examples" / "tiny-collocate.yaml")
    namespace.install("failing", "--values", collocated, "--values", "-", stdin=json.dumps(failing))
    made = namespace.until(ended, "jobs", within_s=300)
    (why,) = [c["reason"] for c in made["status"]["conditions"] if c["type"] == "Failed"]
    assert why == "PodFailurePolicy"
    Job(namespace, "collocate", "", "failing").is_scaled_down()
    pods = sorted(
        namespace.pods("failing", "controller"), key=lambda pod: str(pod["metadata"]["creationTimestamp"])
    )
    ends = [pod["status"]["initContainerStatuses"][0]["state"]["terminated"] for pod in pods]
    assert [end["exitCode"] for end in ends] == [75, 3]
    assert "`false` ended with status 1" in ends[1]["message"]


def rolemesh(command: str, job: Job, *args: str) -> str:
    """As a person at a laptop says it, by the release's name."""
    return run(sys.executable, "-P", "-m", "rolemesh", command, job.name, "-n", job.namespace.name, *args)
