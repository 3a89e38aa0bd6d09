"""What a real API server alone can tell of an installation: what `lookup` finds, and what admission takes."""

from __future__ import annotations

import json

import pytest
from cluster import UNSCHEDULED, WITH_IMAGE, Failed, Namespace
from rendering import CHART

pytestmark = pytest.mark.cluster

TINY = CHART / "examples" / "tiny-standalone.yaml"
SCALER = "autoscaling.reward.scaler=hpa,autoscaling.reward.minReplicas=2,autoscaling.reward.maxReplicas=4"
DASHBOARDS = ("--set", "monitoring.dashboards.labels.look=new")
ANOTHER_JOB = ("--set", "job.trainer.total_training_steps=70")


def upgrade(namespace: Namespace, *args: str, stdin: str | None = None) -> None:
    values = ("--values", str(TINY), *WITH_IMAGE, *UNSCHEDULED)
    namespace.helm("upgrade", "job", str(CHART), *values, *args, stdin=stdin)


def scale(namespace: Namespace, replicas: int, *workloads: str) -> None:
    namespace.kubectl("scale", *workloads, f"--replicas={replicas}")


def replicas(namespace: Namespace) -> dict[str, int]:
    found = namespace.get("deployments,statefulsets")
    return {thing["metadata"]["name"].removeprefix("job-"): thing["spec"]["replicas"] for thing in found}


def generations(namespace: Namespace) -> dict[str, int]:
    """A workload whose specification was changed has the next one."""
    found = namespace.get("deployments,statefulsets")
    return {thing["metadata"]["name"]: thing["metadata"]["generation"] for thing in found}


def test_an_upgrade_keeps_replicas_unless_set_or_in_another_run(
    namespace: Namespace,
) -> None:
    """It changes a number of replicas if it sets that number or begins another run."""
    namespace.install("job", "--values", str(TINY), *UNSCHEDULED)
    scale(namespace, 3, "deployment/job-reward")
    before = generations(namespace)
    upgrade(namespace, *DASHBOARDS)
    assert generations(namespace) == before
    assert replicas(namespace)["reward"] == 3

    upgrade(namespace, "--set", "placement.replicas.reward=2")
    assert replicas(namespace)["reward"] == 2

    scale(namespace, 0, "deployments,statefulsets", "--all")  # as the controller does when the run has ended
    upgrade(namespace, *DASHBOARDS, "--set", "placement.replicas.reward=2")
    assert set(replicas(namespace).values()) == {0}

    upgrade(namespace, *ANOTHER_JOB)
    assert set(replicas(namespace).values()) == {1}
    [job] = namespace.get("jobs")
    namespace.helm("rollback", "job", "1")
    assert set(replicas(namespace).values()) == {1}
    assert [other["metadata"]["name"] for other in namespace.get("jobs")] != [job["metadata"]["name"]]


def test_a_scaler_owns_its_replicas_and_another_run_wakes_them(namespace: Namespace) -> None:
    with_scaler = ("--set", SCALER)
    namespace.install("job", "--values", str(TINY), *UNSCHEDULED, *with_scaler)
    # the scaler's own first deed: it has no less than two
    namespace.until(lambda thing: thing["spec"]["replicas"] == 2, "deployment", "job-reward")
    scale(namespace, 4, "deployment/job-reward")
    for more in (DASHBOARDS, ("--set", "networkPolicy.enabled=false")):
        upgrade(namespace, *with_scaler, *more)
        assert replicas(namespace)["reward"] == 4

    scale(namespace, 0, "deployment/job-reward")
    upgrade(namespace, *with_scaler, *DASHBOARDS)
    assert replicas(namespace)["reward"] == 0
    upgrade(namespace, *with_scaler, *ANOTHER_JOB)
    assert replicas(namespace)["reward"] == 2


def test_the_roles_of_a_statefulset_may_change_their_order(namespace: Namespace) -> None:
    """The API server refuses another serviceName, which is thus not that of the first role in the list."""

    def listed(*roles: str) -> str:
        groups = {"trained": list(roles), "others": ["rollout", "reward"]}
        return json.dumps({"placement": {"strategy": "custom", "groups": groups}})

    namespace.install(
        "job",
        "--values",
        str(TINY),
        *UNSCHEDULED,
        "--values",
        "-",
        stdin=listed("critic", "actor", "reference"),
    )
    before = namespace.one("statefulset", "job-trained")
    upgrade(namespace, "--values", "-", stdin=listed("reference", "actor", "critic"))
    after = namespace.one("statefulset", "job-trained")
    [[first], [second]] = (
        [c["args"][1] for c in of["spec"]["template"]["spec"]["containers"]] for of in (before, after)
    )
    assert (first, second) == ("critic,actor,reference", "reference,actor,critic")
    assert before["spec"]["serviceName"] == after["spec"]["serviceName"] == "job-actor"


@pytest.mark.parametrize(
    "what", ["huggingFace.secret", "storage.data.existingClaim", "rewardFunction.configMap"]
)
def test_a_name_of_an_object_missing_in_the_namespace_is_refused(refusing: Namespace, what: str) -> None:
    with pytest.raises(Failed, match=f"{what} is absent, but namespace {refusing.name} has no such"):
        refusing.install("job", "--values", str(TINY), "--set", f"{what}=absent")


def test_kinds_of_other_projects_are_accepted_if_they_exist(namespace: Namespace) -> None:
    kinds = {
        "podmonitors",
        "prometheusrules",
        "scaledobjects",
        "certificates",
        "issuers",
    }
    known = {line.partition(".")[0] for line in namespace.kubectl("api-resources", "--output=name").split()}
    if missing := (kinds | {"podgroups"}) - known:
        pytest.skip(f"the cluster does not know {', '.join(sorted(missing))}")
    keda = "autoscaling.reward.scaler=keda,autoscaling.reward.maxReplicas=4"
    others = "tls.mode=certManager,gang.scheduler=coscheduling,monitoring.operator=always"
    namespace.install("job", "--values", str(TINY), *UNSCHEDULED, "--set", keda, "--set", others)
    for kind in kinds:
        assert namespace.get(kind, "-l", "app.kubernetes.io/instance=job"), kind
