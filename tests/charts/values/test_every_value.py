"""Every value changes what is rendered, or is refused. What would do nothing in silence is a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from rendering import CHART, Object, objects, refusal, refusals, template, workloads
from test_texts import GROUPS, OPERATED, OWN, SCHEMA, merged

NO_DASHBOARDS: Object = {"monitoring": {"dashboards": {"enabled": False}}}  # large
# Between them, everything that the chart has is in use.
BASES = {
    "operated": merged(OPERATED, NO_DASHBOARDS),
    "own": merged(
        OWN,
        NO_DASHBOARDS
        | {
            "huggingFace": {"fetch": True},
            "placement": {"ranks": {"actor": 8}},
            "roles": {"actor": {"gpus": 8}},
            "serviceAccounts": {"controller": {"name": "mine"}},
        },
    ),
}
# What does nothing in one of them, and is no mistake there: the other has a use for it.
IDLE = {
    "operated": {
        "/gpu/perNode",  # no ranks; it describes the cluster
        "/serviceAccounts/controller/create",  # made in any case, for its rights
    },
    "own": {f"/storage/caches/{key}" for key in ("size", "accessModes", "keep")},  # the claim is yours
}


DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
ALIKE = {("autoscaling",): ["reward"], ("storage",): ["workspace", "caches", "singleNode"]}  # some of many


def cases(node: Object = SCHEMA, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Each place of a value that is no text, and some values for it. Texts have a test in test_texts.py.

    The job's own are left out: all of them are in its file. So are lists of objects, which are passed on whole.
    """
    if "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    for option in node.get("anyOf", ()):
        yield from cases(option, path)
    for name, field in node.get("properties", {}).items():
        if (path or name != "job") and name in ALIKE.get(path, [name]):
            yield from cases(field, (*path, name))
    if isinstance(more := node.get("additionalProperties"), dict):
        at = "/" + "/".join(path)
        if at in GROUPS or at == "/placement/ranks":
            yield from cases(more, (*path, "reward" if at in GROUPS else "actor"))
    kind = node.get("type")
    if "enum" in node:
        yield path, node["enum"]
    elif kind == "boolean":
        yield path, [True, False]
    elif kind in ("integer", "number"):
        least = node.get("minimum", node.get("exclusiveMinimum", -1) + 1)
        yield path, [number for number in (1, 2, 1000) if number >= least]
    elif kind == "array" and "enum" in node["items"]:
        yield path, [[one] for one in node["items"]["enum"]]


CASES = {"/" + "/".join(path): (path, options) for path, options in cases()}


def with_value(path: tuple[str, ...], value: Any) -> Object:
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def has_effect(base: Object, path: tuple[str, ...], options: list[Any]) -> bool:
    found: Any = merged(DEFAULTS, base)
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    for option in options:
        if option == found:
            continue
        values = merged(base, with_value(path, option))
        if refusal(values) or template(values) != template(base):
            return True
    return False


@pytest.mark.parametrize("name", BASES)
def test_every_value_changes_what_is_rendered_or_is_refused(name: str) -> None:
    assert len(CASES) > 60
    assert {at for at, case in CASES.items() if not has_effect(BASES[name], *case)} == IDLE[name]


def test_no_value_is_idle_everywhere() -> None:
    assert not set.intersection(*IDLE.values())


HPA = {"scaler": "hpa", "maxReplicas": 4}
KEDA = HPA | {"scaler": "keda"}
GPUS = {"nvidia.com/gpu": 4}
UNREAD: dict[str, tuple[Object, str]] = {
    "replicas beside a scaler": (
        {"placement": {"replicas": {"reward": 3}}, "autoscaling": {"reward": HPA}},
        "placement.replicas.reward is above 1, but autoscaling.reward decides the number of its pods: set "
        "autoscaling.reward.minReplicas instead",
    ),
    "rows for a scaler that does not count them": (
        {"autoscaling": {"reward": HPA | {"pendingPerReplica": 8}}},
        "autoscaling.reward: pendingPerReplica is set, but the scaler is hpa, which does not count rows",
    ),
    "metrics for a scaler that counts rows": (
        {"autoscaling": {"reward": KEDA | {"metrics": [{"type": "Resource"}]}}},
        "autoscaling.reward: metrics is set, but the scaler is keda, which counts pending rows alone",
    ),
    "a share of no CPU": (
        {"autoscaling": {"reward": HPA}, "groups": {"reward": {"resources": {"limits": {"memory": "4Gi"}}}}},
        "autoscaling.reward.scaler is hpa, which scales by the share of the requested CPU that is used, but a "
        "pod of group reward requests none: set requests.cpu in roles.reward.resources or groups.reward",
    ),
    "GPUs of a role beside its gpus": (
        {"roles": {"actor": {"resources": {"requests": GPUS}}}},
        "roles.actor.resources has nvidia.com/gpu: set roles.actor.gpus instead",
    ),
    "GPUs of a group beside its gpus": (
        {"groups": {"rollout": {"gpus": 1, "resources": {"limits": GPUS}}}},
        "groups.rollout.resources has nvidia.com/gpu: set groups.rollout.gpus instead",
    ),
    "GPUs of the controller": (
        {"controller": {"resources": {"requests": GPUS}}},
        "controller.resources has nvidia.com/gpu: leave it out, as the controller uses no GPU",
    ),
    "two claims at one path": (
        {"storage": {"data": {"existingClaim": "a"}, "models": {"size": "1Gi", "mountPath": "/data/"}}},
        "storage.models.mountPath is /data/, which is that of storage.data, too: set another path for one",
    ),
    "a claim where the chart has a volume": (
        {"storage": {"data": {"existingClaim": "a", "mountPath": "/etc/rolemesh"}}},
        "storage.data: mountPath is /etc/rolemesh, which is reserved for the chart: set another path",
    ),
    "a gang that no scheduler knows": (
        {"gang": {"scheduler": "coscheduling"}},
        "gang.scheduler is coscheduling, but pods of group actor have no schedulerName: set pods.schedulerName",
    ),
    "a queue of nobody": (
        {"gang": {"queue": "lab"}},
        "gang.queue is set, but gang.scheduler has no queues",
    ),
    "a path of no claim": (
        {"storage": {"models": {"mountPath": "/weights"}}},
        "storage.models has settings, but neither a size nor an existingClaim: set one, or leave the settings",
    ),
    "a cache that nobody may write": (
        {"storage": {"caches": {"size": "1Gi", "readOnly": True}}},
        "storage.caches.readOnly is true, but pods write what they compile there",
    ),
    "a cache for nothing": (
        {"huggingFace": {"cache": "/workspace/hub"}},
        "huggingFace.cache is set, but huggingFace.fetch is false",
    ),
    "a token for nothing": (
        {"huggingFace": {"secret": "hub"}},
        "huggingFace.secret is set, but no pod fetches or prepares anything: set huggingFace.fetch to true",
    ),
    "files that nobody imports": (
        {"plugins": {"configMap": "mine"}},
        "plugins.configMap is set, but job.plugins names none of its files",
    ),
    "the kind of an issuer without a name": (
        {"tls": {"mode": "certManager", "issuerRef": {"kind": "ClusterIssuer"}}},
        "tls.issuerRef.kind or group is set, but tls.issuerRef.name is empty",
    ),
    "a variable of the chart": (
        {"groups": {"reward": {"env": [{"name": "HOME", "value": "/a"}]}}},
        "groups.reward: env has HOME, which is reserved for the chart: leave it out, or use another name",
    ),
    "two tokens of the Hub": (
        {
            "huggingFace": {"fetch": True, "secret": "hub"},
            "pods": {"env": [{"name": "HF_TOKEN", "value": "hf_a"}]},
        },
        "pods: env has HF_TOKEN, which is reserved for the chart: huggingFace.secret names another",
    ),
    "the Hub's cache by another name": (
        {"huggingFace": {"fetch": True}, "controller": {"env": [{"name": "HF_HUB_CACHE", "value": "/a"}]}},
        "controller: env has HF_HUB_CACHE, which is reserved for the chart: set huggingFace.cache",
    ),
    "a variable twice": (
        {"pods": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}},
        "env of group actor has A twice: leave one out",
    ),
    "a volume of the chart": (
        {"pods": {"volumes": [{"name": "shm", "emptyDir": {}}]}},
        "pods: volumes has shm, which is reserved for the chart: leave it out, or use another name",
    ),
    "a volume called as a claim": (
        {"pods": {"volumes": [{"name": "data", "emptyDir": {}}]}, "storage": {"data": {"size": "1Gi"}}},
        "pods: volumes has data, which is reserved for the chart: leave it out, or use another name",
    ),
    "a volume twice": (
        {"controller": {"volumes": [{"name": "a", "emptyDir": {}}, {"name": "a", "emptyDir": {}}]}},
        "volumes of the controller has a twice: leave one out",
    ),
    "a path of the chart": (
        {"pods": {"volumeMounts": [{"name": "a", "mountPath": "/etc//rolemesh-tls/"}]}},
        "pods: volumeMounts has /etc/rolemesh-tls, which is reserved for the chart: leave it out, or use",
    ),
    "a path of a claim": (
        {"pods": {"volumeMounts": [{"name": "a", "mountPath": "/workspace/"}]}},
        "volumeMounts of group actor has /workspace, which is storage.workspace.mountPath: use another path",
    ),
    "a path twice": (
        {"pods": {"volumeMounts": [{"name": name, "mountPath": "/a"} for name in ("a", "b")]}},
        "volumeMounts of group actor has /a twice: leave one out",
    ),
}


@pytest.mark.parametrize(("values", "words"), UNREAD.values(), ids=UNREAD)
def test_a_value_that_nothing_reads_is_refused(values: Object, words: str) -> None:
    [said] = refusals(values)
    assert words in said


def test_the_controller_is_not_spread_and_has_no_gpus() -> None:
    for key, value in {"topologyKey": "zone", "gpus": 0, "pods": 1}.items():
        assert f"at '/controller': additional properties '{key}' not allowed" in refusal(
            {"controller": {key: value}}
        )


def spec(values: Object, name: str) -> Any:
    [workload] = [thing for thing in workloads(objects(values)) if thing["metadata"]["name"] == name]
    return workload["spec"]["template"]["spec"]


def test_a_groups_own_settings_do_not_take_those_of_its_gpus() -> None:
    of_gpus, of_group = ({"key": key, "operator": "Exists"} for key in ("nvidia.com/gpu", "reserved"))
    values = {
        "gpu": {"tolerations": [of_gpus], "nodeSelector": {"pool": "any", "gpu": "h100"}},
        "pods": {"tolerations": [{"key": "all"}], "nodeSelector": {"zone": "a"}},
        "groups": {"actor": {"tolerations": [of_group], "nodeSelector": {"pool": "mine"}}},
    }
    actor, critic, reward = (spec(values, f"demo-{name}") for name in ("actor", "critic", "reward"))
    assert actor["tolerations"] == [of_group, of_gpus]
    assert actor["nodeSelector"] == {"pool": "mine", "gpu": "h100"}
    assert critic["tolerations"] == [{"key": "all"}, of_gpus]
    assert reward["tolerations"] == [{"key": "all"}]
    assert reward["nodeSelector"] == {"zone": "a"}


def test_a_group_may_have_another_runtime_class_than_gpus() -> None:
    values = {"gpu": {"runtimeClassName": "nvidia"}, "groups": {"actor": {"runtimeClassName": "kata"}}}
    assert spec(values, "demo-actor")["runtimeClassName"] == "kata"
    assert spec(values, "demo-critic")["runtimeClassName"] == "nvidia"


def test_affinity_of_yours_holds_beside_that_to_the_single_node() -> None:
    near = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "zone"}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    values = {"pods": {"affinity": {"podAffinity": {required: [near]}}}, "storage": {"singleNode": True}}
    terms = spec(values, "demo-actor")["affinity"]["podAffinity"][required]
    assert [term["topologyKey"] for term in terms] == ["kubernetes.io/hostname", "zone"]


def test_a_variable_that_tunes_threads_may_be_replaced() -> None:
    yours = [{"name": name, "value": "x"} for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")]
    [container] = spec({"pods": {"env": yours}}, "demo-actor")["containers"]
    names = [entry["name"] for entry in container["env"]]
    assert len(set(names)) == len(names)
    assert container["env"][-2:] == yours
