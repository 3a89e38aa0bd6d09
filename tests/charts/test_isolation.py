"""What a pod may reach and be called, by the chart's values."""

from __future__ import annotations

from typing import Any

import pytest
from rendering import Object, notes, objects, of_kind, pods, refusal, refusals, selects, template, workloads

from rolemesh import __version__

ANYWHERE: Object = {}
DNS_PORTS = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
OPENSHIFT = [{"port": 5353, "protocol": "UDP"}, {"port": 5353, "protocol": "TCP"}]
HUB = {"ports": [{"port": 443}]}
JUDGE = {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"port": 8443}]}
OPENAI = {
    "name": "openai",
    "openai": {
        "urls": ["http://10.0.0.7:8000", "https://fleet.example/v1", "http://fleet:8001", "http://[fd00::7]:8"],
        "weights_dir": "/mnt/weights",
    },
}


def policy_of(component: str, values: Object) -> Object:
    """The one policy for a component's pods."""
    labels = {"app.kubernetes.io/name": "rlhf-job", "app.kubernetes.io/instance": "demo"}
    labels["app.kubernetes.io/component"] = component
    [policy] = [
        thing["spec"]
        for thing in of_kind(objects(values), "NetworkPolicy")
        if selects(thing["spec"]["podSelector"], labels)
    ]
    return policy


def leaving(component: str, values: Object) -> list[Object]:
    """Rules of egress other than to DNS and to pods of the job."""
    dns, *rules = policy_of(component, values)["egress"]
    assert dns["ports"] == DNS_PORTS
    assert dns["to"]
    return [rule for rule in rules if not all("podSelector" in peer for peer in rule.get("to", [{}]))]


@pytest.mark.parametrize("component", ["actor", "critic", "rollout", "reward"])
def test_roles_reach_nothing_outside_of_the_job(component: str) -> None:
    assert leaving(component, {}) == []


def test_reward_pods_reach_only_dns_and_their_functions_egress() -> None:
    """They reach no pod of the job."""
    values = {"rewardFunction": {"egress": [JUDGE]}, "networkPolicy": {"prepareEgress": [HUB]}}
    assert policy_of("reward", values)["egress"][1:] == [JUDGE]
    assert leaving("actor", values) == [HUB]
    assert leaving("rollout", values) == [HUB]


def test_pods_reach_what_the_identity_of_their_account_needs() -> None:
    """Such as a cloud's STS: a role that reads its model with an identity, and no pod of another account."""
    accounts = {name: {"egress": [{"ports": [{"port": port}]}]} for port, name in enumerate(
        ("roles", "reward", "controller"), 1000)}  # fmt: skip
    for component, port in {"actor": 1000, "rollout": 1000, "reward": 1001, "controller": 1002}.items():
        rules = leaving(component, {"serviceAccounts": accounts})
        assert [rule for rule in rules if rule != ANYWHERE] == [{"ports": [{"port": port}]}]
    shared = {"placement": {"strategy": "collocate"}, "serviceAccounts": {"roles": accounts["roles"]}}
    assert leaving("all", shared) == accounts["roles"]["egress"]


def test_values_of_an_earlier_chart_allow_no_account_egress() -> None:
    """With `--reuse-values` Helm takes that chart's defaults, too."""
    earlier = {"serviceAccounts": {key: {"egress": None} for key in ("roles", "reward", "controller")}}
    assert template(earlier) == template({})


def test_a_pod_shared_with_a_reward_reaches_what_each_role_may() -> None:
    values = {
        "placement": {"strategy": "hybrid"},
        "rewardFunction": {"egress": [JUDGE]},
        "networkPolicy": {"prepareEgress": [HUB]},
    }
    assert leaving("scoring", values) == [JUDGE, HUB]
    assert leaving("policy", values) == [HUB]


def test_a_rollout_by_other_servers_reaches_them_on_their_ports() -> None:
    to_one = {"to": [{"ipBlock": {"cidr": "10.0.0.7/32"}}], "ports": [{"port": 8000}]}
    by_ipv6 = {"to": [{"ipBlock": {"cidr": "fd00::7/128"}}], "ports": [{"port": 8}]}
    servers = [to_one, {"ports": [{"port": 443}]}, {"ports": [{"port": 8001}]}, by_ipv6]
    assert leaving("rollout", {"job": {"rollout": OPENAI}}) == servers
    assert leaving("actor", {"job": {"rollout": OPENAI}}) == []


@pytest.mark.parametrize(
    ("ports", "expected"), [([53], DNS_PORTS), ([5353], OPENSHIFT), ([53, 5353], DNS_PORTS + OPENSHIFT)]
)
def test_dns_is_reached_on_the_ports_that_values_say(ports: list[int], expected: list[Object]) -> None:
    for component in ("actor", "reward", "controller"):
        dns = policy_of(component, {"networkPolicy": {"dnsPorts": ports}})["egress"][0]
        assert dns["ports"] == expected


@pytest.mark.parametrize("ports", [[], [0], [65536], ["dns"]])
def test_a_rule_for_dns_without_a_valid_port_is_refused(ports: list[Any]) -> None:
    """No port in a rule of Kubernetes is every port."""
    assert "at '/networkPolicy/dnsPorts" in refusal({"networkPolicy": {"dnsPorts": ports}})


def test_the_controller_reaches_what_values_say() -> None:
    assert leaving("controller", {}) == [ANYWHERE]
    assert leaving("controller", {"networkPolicy": {"controllerEgress": [HUB]}}) == [HUB]


@pytest.mark.parametrize("mode", ["none", "certManager"])
@pytest.mark.parametrize("scaler", ["hpa", "keda"])
def test_only_keda_reads_the_load_where_a_scaler_is_keda(scaler: str, mode: str) -> None:
    """On the port of the URL that it is given, which the controller listens on."""
    mine: Object = {"namespaceSelector": {"matchLabels": {"team": "scaling"}}}
    values = {
        "tls": {"mode": mode},
        "networkPolicy": {"scalerFrom": [mine], "metricsFrom": []},
        "autoscaling": {"reward": {"scaler": scaler, "maxReplicas": 4}},
    }
    may = [{"from": [mine], "ports": [{"port": 9090}]}]
    assert policy_of("controller", values)["ingress"] == (may if scaler == "keda" else [])
    [job] = of_kind(objects(values), "Job")
    assert "--metrics-listen=0.0.0.0:9090" in job["spec"]["template"]["spec"]["containers"][0]["args"]


def test_prometheus_reaches_each_rank_of_a_pod() -> None:
    values: Object = {"placement": {"ranks": {"critic": 4}}, "roles": {"critic": {"gpus": 4}}}
    (pod,) = [
        each["spec"]["template"]
        for each in of_kind(objects(values), "StatefulSet")
        if "critic" in each["metadata"]["name"]
    ]
    ports = [
        port["containerPort"] for port in pod["spec"]["containers"][0]["ports"] if "metrics" in port["name"]
    ]
    assert ports == [9090, 9091, 9092, 9093]
    assert {"port": 9090, "endPort": 9093} in [
        rule["ports"][0] for rule in policy_of("critic", values)["ingress"]
    ]
    assert {"port": 9090} in [rule["ports"][0] for rule in policy_of("actor", values)["ingress"]]


def test_an_empty_list_of_peers_means_nobody() -> None:
    """In a rule of Kubernetes it means everybody."""
    keda = {"reward": {"scaler": "keda", "maxReplicas": 4}}
    closed = {"metricsFrom": [], "scalerFrom": [], "dnsTo": [], "controllerEgress": []}
    values = {"networkPolicy": closed, "autoscaling": keda}
    things = of_kind(objects(values), "NetworkPolicy")
    rules = [rule for thing in things for rule in (*thing["spec"]["ingress"], *thing["spec"]["egress"])]
    assert rules
    assert all(rule.get("from") or rule.get("to") for rule in rules)
    assert {port["port"] for rule in rules for port in rule["ports"]} == {50051}
    assert policy_of("controller", values)["ingress"] == []


# ----------------------------------------------------------------------------------- labels and images


OWN_LABELS = [
    ("labels", "app.kubernetes.io/name"),
    ("labels", "app.kubernetes.io/instance"),
    ("labels", "app.kubernetes.io/component"),
    ("labels", "rolemesh.dev/role-reward"),
    ("labels", "rolemesh.dev/group"),
    ("labels", "rolemesh.dev/role-actor"),  # which the reward's pods do not have
    ("labels", "rolemesh.dev/anything"),
    ("annotations", "checksum/job"),
    ("annotations", "prometheus.io/port"),
    ("annotations", "rolemesh.dev/anything"),
    ("annotations", "helm.sh/hook"),
]


RESERVED = "reserved for the chart: leave it out, or use another name"


def said_of(name: str) -> str:
    return "a name that begins with rolemesh.dev/" if name.startswith("rolemesh.dev/") else name


@pytest.mark.parametrize(
    ("where", "kind", "name"),
    [("pods", *own) for own in OWN_LABELS]
    + [(where, *own) for where in ("groups", "controller") for own in OWN_LABELS[5::2]],
)
def test_a_label_of_the_charts_own_is_refused(where: str, kind: str, name: str) -> None:
    given = {kind: {name: "mine"}}
    place, values = ("groups.reward", {"reward": given}) if where == "groups" else (where, given)
    assert refusals({where: values}) == [f"{place}: {kind} has {said_of(name)}, which is {RESERVED}"]


@pytest.mark.parametrize("where", ["labels", "dashboards.labels"])
@pytest.mark.parametrize("name", ["app.kubernetes.io/name", "helm.sh/chart", "rolemesh.dev/role-actor"])
def test_a_reserved_label_on_monitoring_objects_is_refused(where: str, name: str) -> None:
    labels = {"labels": {name: "mine"}}
    said = refusals({"monitoring": {"dashboards": labels} if "dashboards" in where else labels})
    place = f"monitoring.{where}".removesuffix(".labels")
    assert said == [f"{place}: labels has {said_of(name)}, which is {RESERVED}"]


def test_labels_of_yours_are_beside_the_charts() -> None:
    things = objects({"pods": {"labels": {"team": "a"}}, "groups": {"reward": {"labels": {"team": "b"}}}})
    teams = {
        t["metadata"]["name"]: t["spec"]["template"]["metadata"]["labels"]["team"] for t in workloads(things)
    }
    assert teams == {"demo-actor": "a", "demo-critic": "a", "demo-rollout": "a", "demo-reward": "b"}


DIGEST = "sha256:" + "0a" * 32


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({}, f"localhost/rolemesh:{__version__}-gpu"),
        ({"tag": 1}, "localhost/rolemesh:1"),
        ({"tag": 20251122123456}, "localhost/rolemesh:20251122123456"),
        ({"tag": "1.10"}, "localhost/rolemesh:1.10"),
        ({"tag": "a" * 128}, f"localhost/rolemesh:{'a' * 128}"),
        ({"repository": "r.example:5000/a/b__c-d.e", "tag": "_1.x-Y"}, "r.example:5000/a/b__c-d.e:_1.x-Y"),
        ({"repository": "[::1]:5000/a", "tag": 0}, "[::1]:5000/a:0"),
        ({"repository": "rolemesh", "tag": "v1"}, "rolemesh:v1"),
        ({"digest": DIGEST}, f"localhost/rolemesh@{DIGEST}"),
        ({"digest": DIGEST, "tag": "v1"}, f"localhost/rolemesh@{DIGEST}"),
    ],
)
def test_an_image_is_named_by_its_tag_or_its_digest(image: dict[str, Any], expected: str) -> None:
    used = {
        container["image"]
        for thing in workloads(objects({"image": image}))
        for container in thing["spec"]["template"]["spec"]["containers"]
    }
    assert used == {expected}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tag", "a b"),
        ("tag", ".a"),
        ("tag", "a:b"),
        ("tag", "a" * 129),
        ("tag", -1),
        ("repository", ""),
        ("repository", "a b"),
        ("repository", "r.example/a:v1:2"),
        ("repository", "https://r.example/a"),
        ("repository", "r.example/A"),
        ("digest", "sha256:0a"),
        ("digest", DIGEST.upper()),
    ],
)
def test_values_that_name_no_valid_image_are_refused(key: str, value: str | int) -> None:
    assert f"at '/image/{key}'" in refusal({"image": {key: value}})


# ------------------------------------------------------------------------------------------------ GPUs


def gpus(values: Object) -> dict[str, int]:
    return {
        thing["metadata"]["name"].removeprefix("demo-"): container["resources"]["limits"].get(
            "nvidia.com/gpu", 0
        )
        for thing in workloads(objects(values))
        for container in thing["spec"]["template"]["spec"]["containers"]
    }


def test_a_rollout_by_other_servers_asks_for_no_gpu() -> None:
    assert gpus({"job": {"rollout": OPENAI}}) == {"actor": 1, "critic": 1, "reward": 0, "rollout": 0}
    shared = {"placement": {"strategy": "hybrid"}, "job": {"rollout": OPENAI}}
    assert gpus(shared) == {"policy": 1, "scoring": 1}
    assert "requests 1 GPUs, but its roles use 0" in refusal(
        {"job": {"rollout": OPENAI}, "groups": {"rollout": {"gpus": 1}}}
    )


def test_a_model_without_a_gpu_is_in_the_notes_or_refused(tmp_path: Any) -> None:
    reward = {"reward": {"reward_model": {"enable": True}}}
    told = "ON CPU, WITHOUT A GPU: reward of group reward. Set roles.reward.gpus to 1 to use a GPU."
    assert told in notes({"job": reward}, tmp_path)
    assert "WITHOUT A GPU" not in notes({"job": reward, "roles": {"reward": {"gpus": 1}}}, tmp_path)
    assert "WITHOUT A GPU" not in notes({}, tmp_path)
    said = refusal({"job": reward | {"trainer": {"device": "cuda"}}})
    assert "a pod of group reward has no GPU for the models of reward: set roles.reward.gpus to 1" in said
    assert "roles.rollout" not in refusal({"job": {"rollout": OPENAI, "trainer": {"device": "cuda"}}})


def test_a_mesh_takes_pods_in_only_if_the_values_say_so() -> None:
    """Also pods of a RayCluster, of `helm test`, and of a group with labels of its own."""
    out = {
        "sidecar.istio.io/inject": "false",
        "istio.io/dataplane-mode": "none",
        "linkerd.io/inject": "disabled",
    }
    values = {
        "placement": {"ranks": {"actor": 16}},
        "roles": {"actor": {"gpus": 16}},
        "groups": {"reward": {"labels": {"team": "b"}, "annotations": {"team": "b"}}},
    }
    own = {"pods": {"labels": {"sidecar.istio.io/inject": "true"}}}  # a label of yours is kept
    assert {pod["metadata"]["labels"]["sidecar.istio.io/inject"] for pod in pods(objects(own))} == {"true"}
    for inside in (False, True):
        said = [
            pod["metadata"]["labels"] | pod["metadata"]["annotations"]
            for pod in pods(objects(values | {"serviceMesh": inside}))
        ]
        assert len(said) == 7
        assert [out.items() <= each.items() for each in said] == [not inside] * 7
        assert [bool(out.keys() & each.keys()) for each in said] == [not inside] * 7


def test_notes_say_that_what_prepares_has_no_network(tmp_path: Any) -> None:
    prepare = {"prepare": [{"creates": "x", "command": ["make", "x"]}]}
    told = "PREPARE HAS NO NETWORK: if a command of `prepare` downloads something, set networkPolicy.prepareEg"
    assert told in notes(prepare, tmp_path)
    for other in ({"prepareEgress": [HUB]}, {"enabled": False}):
        assert told not in notes(prepare | {"networkPolicy": other}, tmp_path)


CONVERSES: Object = {"job": {"rollout": {"multi_turn": {"enable": True}}}}


def test_only_the_controller_calls_environments_of_conversations() -> None:
    """They reach what their tools may reach and nothing else, and scale like every stateless role."""
    assert not [
        each for each in of_kind(objects({}), "Deployment") if "environment" in each["metadata"]["name"]
    ]
    may = {"networkPolicy": {"environmentEgress": [JUDGE], "prepareEgress": [HUB]}}
    scaled = {"autoscaling": {"environment": {"scaler": "hpa", "maxReplicas": 4}}}
    values = CONVERSES | may | scaled
    [deployment] = [
        each
        for each in of_kind(objects(values), "Deployment")
        if each["metadata"]["name"] == "demo-environment"
    ]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})
    workspace = next(each for each in container["volumeMounts"] if each["name"] == "workspace")
    assert workspace["readOnly"] is True
    policy = policy_of("environment", values)
    assert policy["egress"][1:] == [JUDGE]
    [calls, _] = policy["ingress"]
    [peer] = calls["from"]
    assert peer["podSelector"]["matchExpressions"][0]["values"] == ["controller", "check"]
    [scaler] = of_kind(objects(values), "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == "demo-environment"
    assert "demo-environment" in [each["metadata"]["name"] for each in of_kind(objects(values), "Service")]
    [controller] = of_kind(objects(values), "Job")
    [process] = controller["spec"]["template"]["spec"]["containers"]
    assert any("--environment" in argument for argument in process["command"] + process.get("args", []))
