"""A real API server takes the chart: its objects, its pods under Pod Security, its account's rights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from cluster import UNSCHEDULED, Failed, Namespace, Object, claims_of_the_user, knows
from rendering import CHART, EXAMPLES, selects

pytestmark = pytest.mark.cluster

KINDS = (
    "deployments,statefulsets,jobs,pods,services,configmaps,serviceaccounts,roles,rolebindings,"
    "poddisruptionbudgets,networkpolicies,persistentvolumeclaims,secrets"
)
TINY = CHART / "examples" / "tiny-standalone.yaml"
RANKS = CHART / "examples" / "tiny-ranks.yaml"


def example(path: Path) -> tuple[str, ...]:
    return ("--values", str(path), *UNSCHEDULED)


def objects_of(namespace: Namespace, release: str) -> set[str]:
    found = namespace.get(KINDS, "-l", f"app.kubernetes.io/instance={release}")
    return {f"{thing['kind']}/{thing['metadata']['name']}" for thing in found}


def admitted(namespace: Namespace, release: str, within_s: float = 120) -> None:
    """Every pod that the release asks for is there: neither Pod Security nor a quota has refused one."""

    def has_all(workload: Object) -> bool:
        status = workload.get("status", {})
        return bool(status.get("replicas", status.get("active")) == workload["spec"].get("replicas", 1))

    of_release = f"app.kubernetes.io/instance={release}"
    for workload in namespace.get("deployments,statefulsets,jobs", "-l", of_release):
        if not has_all(workload):
            namespace.until(has_all, workload["kind"].lower(), workload["metadata"]["name"], within_s=within_s)


def counts_as_much_as_it_allows(quota: Object) -> bool:
    status = quota.get("status", {})
    return "used" in status and status["used"] == status["hard"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_installs_upgrades_rolls_back_and_uninstalls(namespace: Namespace, path: Path) -> None:
    claims_of_the_user(namespace)
    if path == RANKS and not knows("rayclusters.ray.io"):
        with pytest.raises(Failed, match=r"the cluster does not know \S*RayCluster: install KubeRay"):
            namespace.install("job", *example(path))
        return
    namespace.install("job", *example(path))
    admitted(namespace, "job")
    before = objects_of(namespace, "job")

    namespace.helm("upgrade", "job", str(CHART), "--reuse-values", "--set", "pods.labels.team=alignment")
    admitted(namespace, "job")
    namespace.helm("rollback", "job", "1")
    admitted(namespace, "job")
    stays = {"Pod"}
    assert {o for o in objects_of(namespace, "job") if o.partition("/")[0] not in stays} == {
        o for o in before if o.partition("/")[0] not in stays
    }

    kept = {
        f"PersistentVolumeClaim/{claim['metadata']['name']}"
        for claim in namespace.get("persistentvolumeclaims", "-l", "app.kubernetes.io/instance=job")
        if claim["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    namespace.helm("uninstall", "job", "--wait", "--cascade=foreground")
    assert objects_of(namespace, "job") == kept


def test_two_releases_in_a_namespace_never_touch_each_other(namespace: Namespace) -> None:
    long = "a-second-job-whose-name-is-as-long-as-helm-allows-it1"
    assert len(long) == 53
    for release in ("job", long):
        namespace.install(release, *example(TINY))
        admitted(namespace, release)
    for release, other in (("job", long), (long, "job")):
        theirs = [pod["metadata"]["labels"] for pod in namespace.pods(other)]
        assert theirs
        for thing in namespace.get(
            "services,deployments,statefulsets,networkpolicies,poddisruptionbudgets",
            "-l",
            f"app.kubernetes.io/instance={release}",
        ):
            selector = thing["spec"].get("selector", thing["spec"].get("podSelector"))
            assert not any(selects(selector, labels) for labels in theirs), thing["metadata"]["name"]
    before = objects_of(namespace, long)
    namespace.helm("uninstall", "job", "--wait", "--cascade=foreground")
    assert objects_of(namespace, long) == before


def test_the_controllers_account_has_exactly_the_rights_it_uses(namespace: Namespace) -> None:
    """It reads whether roles are scaled down, scales its own, and deletes the budget of its own pod."""
    namespace.install("job", *example(TINY))
    namespace.install("other", *example(TINY))
    slices = [Act(verb, "endpointslices", group="discovery.k8s.io") for verb in ("list", "watch")]
    scaling, reading, others = [], [], []
    for role in ("actor", "critic", "rollout", "reference", "reward"):
        kind = "statefulsets" if role in ("actor", "critic") else "deployments"
        scaling += [Act(verb, kind, f"job-{role}", "scale", group="apps") for verb in ("get", "patch")]
        others += [Act(verb, kind, f"other-{role}", "scale", group="apps") for verb in ("get", "patch")]
        reading.append(Act("get", kind, f"job-{role}", group="apps"))
        others += [Act(verb, kind, f"job-{role}", group="apps") for verb in ("patch", "delete")]
        others.append(Act("delete", "poddisruptionbudgets", f"job-{role}", group="policy"))
    budget = Act("delete", "poddisruptionbudgets", "job-controller", group="policy")
    others += [
        Act("delete", "poddisruptionbudgets", "other-controller", group="policy"),
        Act("patch", "poddisruptionbudgets", "job-controller", group="policy"),
        Act("list", "deployments", group="apps"),
        Act("get", "secrets"),
        Act("list", "pods"),
        Act("create", "pods"),
        Act("create", "pods", subresource="exec"),
        Act("delete", "pods"),
        Act("create", "jobs", group="batch"),
        Act("delete", "jobs", group="batch"),
        Act("patch", "configmaps"),
        Act("update", "deployments", group="apps"),
        Act("patch", "rayclusters", "job-actor", group="ray.io"),
        Act("patch", "scaledobjects", "job-reward", group="keda.sh"),
    ]
    may = [*slices, *scaling, budget]
    assert allowed(namespace, "job-controller", *may, *reading, *others) == may
    assert allowed(namespace, "default", *slices) == []

    # To scale up it also reads the number of pods that the values ask for.
    upgrade = ("upgrade", "job", str(CHART), "--reuse-values", "--set", "controller.scaleUp=true")
    namespace.helm(*upgrade)
    assert allowed(namespace, "job-controller", *may, *reading, *others) == [*may, *reading]


def test_scale_up_is_refused_while_workloads_have_several_pods(namespace: Namespace) -> None:
    """Kubernetes would set the number, which the manifests then leave out, to 1. Later upgrades find any."""
    upgrade = ("upgrade", "job", str(CHART), "--reuse-values", "--set", "controller.scaleUp=true")
    namespace.install("job", *example(TINY), "--set", "placement.replicas.reward=2")
    with pytest.raises(Failed, match="deployment job-reward has 2, and Kubernetes would set it to 1"):
        namespace.helm(*upgrade)
    namespace.kubectl("scale", "deployment/job-reward", "--replicas=1")
    namespace.helm(*upgrade)
    namespace.kubectl("scale", "deployment/job-reward", "--replicas=2")
    namespace.helm(*upgrade)
    assert namespace.one("deployment", "job-reward")["spec"]["replicas"] == 2


@dataclass(frozen=True)
class Act:
    """What an account may ask the API server for, or may not."""

    verb: str
    resource: str
    name: str = ""
    subresource: str = ""
    group: str = ""


def allowed(namespace: Namespace, account: str, *acts: Act) -> list[Act]:
    """Those of the acts that the API server allows the account, by its own review."""
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    reviews = [
        {**kind, "spec": {"resourceAttributes": {"namespace": namespace.name, **asdict(act)}}} for act in acts
    ]
    asked = json.dumps({"apiVersion": "v1", "kind": "List", "items": reviews})
    who = f"--as=system:serviceaccount:{namespace.name}:{account}"
    answers = namespace.kubectl(
        "create", "-f", "-", who, "-o", 'jsonpath={.status.allowed}{"\\n"}', stdin=asked
    )
    return [act for act, answer in zip(acts, answers.split(), strict=True) if answer == "true"]


def test_no_pod_but_the_controllers_has_a_token(namespace: Namespace) -> None:
    namespace.install("job", *example(TINY))
    admitted(namespace, "job")
    for pod in namespace.pods("job"):
        has = any(
            "serviceAccountToken" in source
            for volume in pod["spec"]["volumes"]
            for source in volume.get("projected", {}).get("sources", ())
        )
        assert has == (pod["metadata"]["labels"]["app.kubernetes.io/component"] == "controller")


def test_a_quota_counts_what_the_values_ask_for(namespace: Namespace) -> None:
    """With a quota on them, a pod is refused in which any container lacks a request or a limit.

    What the quota says was used may be counted over fewer pods than there are: Kubernetes counts anew after
    five minutes. A quota made after the pods is counted over all.
    """
    hard = "pods=6,requests.cpu=300m,requests.memory=1536Mi,limits.memory=12Gi"
    namespace.kubectl("create", "quota", "job", f"--hard={hard}")
    namespace.install("job", *example(TINY))
    admitted(namespace, "job", within_s=360)  # one refused before the quota is counted is tried anew
    namespace.kubectl("create", "quota", "counted", f"--hard={hard}")
    namespace.until(counts_as_much_as_it_allows, "resourcequota", "counted")


def test_a_workspace_that_is_to_be_kept_is_all_that_is_left(namespace: Namespace) -> None:
    namespace.install("job", *example(TINY), "--set", "storage.workspace.keep=true")
    admitted(namespace, "job")
    namespace.helm("uninstall", "job", "--wait", "--cascade=foreground")
    assert objects_of(namespace, "job") == {"PersistentVolumeClaim/job-workspace"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("placement.strategy=standalon", "standalone"),
        ("storage.workspace.existingClaim=absent", "create it, or name an existing one"),
        ("job.trainer.total_trainin_steps=3", "total_trainin_steps"),
        ("roles.actor.gpus=1", "image.kind is cpu"),
        ("autoscaling.critic.scaler=hpa", "critic"),
    ],
)
def test_contradicting_values_are_refused_before_objects_exist(
    refusing: Namespace, values: str, words: str
) -> None:
    with pytest.raises(Failed, match=words):
        refusing.install("job", *example(TINY), "--set", values)
    assert objects_of(refusing, "job") == set()
