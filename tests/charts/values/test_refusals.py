"""What cannot become a job is refused in one sentence that says what to change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from rendering import CHART, KUBERNETES, Refused, helm, objects, refusal, refusals, run_go, template, workloads

from helm_values import generate
from helm_values.generate import generated, schema
from helm_values.values import Values
from rolemesh.checks.chart_values import check_values
from rolemesh.config.job import make_job
from rolemesh.errors import InvalidConfig

SCALER = {"scaler": "hpa", "maxReplicas": 3}
FOUR_RANKS = {"rollout": {"name": "vllm", "tensor_model_parallel_size": 4}}
CPU = {"image": {"kind": "cpu"}, "roles": {role: {"gpus": 0} for role in ("actor", "rollout", "critic")}}
CUSTOM = {"strategy": "custom", "groups": {"a": ["actor", "rollout", "reference"], "b": ["critic", "reward"]}}

DIGEST = "sha256:" + "0a" * 32

SENTENCES: dict[str, tuple[dict[str, Any], str]] = {
    "a repository with its tag": (
        {"image": {"repository": "r.example:5000/a:v1"}},
        "image.repository has a tag: put the tag in image.tag",
    ),
    "a repository that is a name with its tag": (
        {"image": {"repository": "rolemesh:1"}},
        "put the tag in image.tag",
    ),
    "a repository with its digest": (
        {"image": {"repository": f"r.example/a:v1@{DIGEST}"}},
        "image.repository has a digest: put the digest in image.digest",
    ),
    "groups of two sources": ({"placement": CUSTOM | {"strategy": "hybrid"}}, "set the strategy to custom"),
    "groups of none": (
        {"placement": {"strategy": "custom"}},
        "but placement.groups is empty: list the roles of",
    ),
    "no group with a role of every job": (
        {"placement": {"strategy": "custom", "groups": {"a": ["critic"], "b": ["rollout", "reward"]}}},
        "placement.groups has no group with actor, which every job has: add it to a group",
    ),
    "a role twice in a group": (
        {"placement": {"strategy": "custom", "groups": {"a": ["actor", "actor"]}}},
        "placement.groups.a: a list with each role once: leave out the second",
    ),
    "a cache that nobody may write, without a claim": (
        {"storage": {"caches": {"readOnly": True}}},
        "storage.caches has settings, but neither a size nor an existingClaim",
    ),
    "scaling up without scaling down": (
        {"controller": {"scaleUp": True, "scaleDown": None}},
        "set controller.scaleDown and controller.rbac to true",
    ),
    "placement inside the job": ({"job": {"placement": {"strategy": "hybrid"}}}, "move it to placement"),
    "settings of a group that is not": (
        {"groups": {"policy": {"gpus": 1}}},
        "placement.strategy standalone has the groups actor, critic, environment, reference, reward, rollout: ",
    ),
    "replicas of what is trained": (
        {"placement": {"strategy": "hybrid", "replicas": {"rollout": 2}}},
        "and actor has 1 (a trained role has 1): give rollout a group of its own",
    ),
    "replicas that differ in a group": (
        {"placement": {"strategy": "collocate", "replicas": {"reward": 3}}},
        "placement.replicas.reward is 3, but a pod has all roles of its group all, and",
    ),
    "a group of several ranks": (
        {"placement": {"ranks": {"actor": 2}}},
        "group actor has 2 ranks, but gpus of actor is 1: set both to the same number",
    ),
    "several GPUs for each group": (
        {"job": {"trainer": {"n_gpus_per_node": 4, "nnodes": 2}}},
        "job.trainer.n_gpus_per_node times nnodes is above 1, but the chart takes the ranks of a group",
    ),
    "ranks that do not divide among pods": (
        {"placement": {"ranks": {"actor": 9}}, "roles": {"actor": {"gpus": 9}}},
        "group actor has 9 ranks, which do not divide among 2 pods",
    ),
    "several pods for one rank": (
        {"groups": {"actor": {"pods": 2}}},
        "groups.actor.pods is 2, but the group has one",
    ),
    "a launcher": ({"placement": {"launcher": "ray"}}, "placement.launcher is ray, but the chart decides this"),
    "a scaler on a shared group": (
        {"placement": {"strategy": "hybrid"}, "autoscaling": {"reward": SCALER}},
        "reward shares the pods of group scoring with critic, which would be scaled with it: give reward",
    ),
    "a scaler of a role that is not": (
        {"autoscaling": {"reference": SCALER}},
        "this job has no reference: remove it",
    ),
    "a scaler's bounds": ({"autoscaling": {"reward": SCALER | {"minReplicas": 4}}}, "minReplicas is more than"),
    "more GPUs than a node has": (
        {"roles": {"actor": {"gpus": 16}}},
        "requests 16 GPUs, but a node has 8 (gpu.perNode): lower gpus of actor, or spread its models",
    ),
    "more GPUs than a small node has": (
        {"gpu": {"perNode": 4}, "groups": {"actor": {"gpus": 5}}},
        "a node has 4",
    ),
    "more GPUs than a role uses": (
        {"roles": {"actor": {"gpus": 2}}},
        "a pod of group actor requests 2 GPUs, but its roles use 1: set gpus of actor to 1",
    ),
    "more GPUs than an engine's ranks": (
        {"roles": {"rollout": {"gpus": 8}}, "job": FOUR_RANKS},
        "a pod of group rollout requests 8 GPUs, but its roles use 4",
    ),
    "GPUs among the limits": (
        {"roles": {"reward": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}},
        "roles.reward.resources has nvidia.com/gpu: set roles.reward.gpus instead",
    ),
    "GPUs for an image without CUDA": (
        {"image": {"kind": "cpu"}},
        "requests GPUs, but image.kind is cpu: set gpus",
    ),
    "GPUs for a job on CPUs": (
        {"job": {"trainer": {"device": "cpu"}}},
        "requests GPUs, but job.trainer.device is cpu",
    ),
    "an engine that the image lacks": (
        CPU | {"job": {"rollout": {"name": "vllm"}}},
        "job.rollout.name is vllm, but image.kind is cpu, and such an image has no vLLM: set job.rollout.name",
    ),
    "fewer GPUs than ranks": (
        {"job": FOUR_RANKS},
        "a pod of group rollout has 1 GPUs: set roles.rollout.gpus to 4",
    ),
    "a memory limit below a version of the weights": (  # 2 bytes of each parameter
        {"roles": {"rollout": {"billionParameters": 24}}, "job": {"rollout": {"name": "vllm"}}},
        "group rollout has a memory limit of 32Gi, but its rollout takes about 51.7 GiB of host memory: 7.0 "
        "GiB for its processes, and 44.7 GiB for weights of roles.rollout.billionParameters 24: raise the",
    ),
    "a memory limit below a version and an engine asleep": (  # 48.4 GiB, twice
        {
            "placement": {"strategy": "hybrid"},
            "job": {"rollout": {"name": "vllm"}},
            "roles": {"rollout": {"billionParameters": 26}},
        },
        "a pod of group policy has a memory limit of 96Gi, but its rollout takes about 103.9 GiB of host memory"
        ": 7.0 GiB for its processes, and 96.9 GiB",
    ),
    "no room for the run": (
        {"storage": {"workspace": {"size": ""}}},
        "neither a size nor an existingClaim: set one",
    ),
    "a reward that nobody reads": (
        {"rewardFunction": {"code": "x = 1"}},
        "/etc/rolemesh-reward/reward.py, where the code is mounted",
    ),
    "two nodes for all pods": (
        {
            "storage": {"singleNode": True},
            "gpu": {"nodeSelector": {"pool": "gpu"}},
            "groups": {"reward": {"nodeSelector": {"pool": "cpu"}}},
        },
        "the pods of critic need a node with pool gpu and those of reward one with cpu: set the same",
    ),
    "a scaler under Kueue": (
        {"autoscaling": {"reward": SCALER}, "gang": {"scheduler": "kueue", "queue": "lab"}},
        "and adds more; remove it, or set the scheduler to none",
    ),
    "ranks on parts of GPUs": (
        {
            "gpu": {"resource": "nvidia.com/mig-3g.40gb"},
            "placement": {"ranks": {"actor": 2}},
            "roles": {"actor": {"gpus": 2}},
        },
        "a pod of group actor requests 2 of nvidia.com/mig-3g.40gb, but parts of GPUs cannot work together",
    ),
    "a claim of one pod": (
        {"storage": {"workspace": {"accessModes": ["ReadWriteOncePod"]}, "singleNode": True}},
        "storage.workspace: accessModes has ReadWriteOncePod, with which one pod alone can mount the claim",
    ),
    "a claim of one node": (
        {
            "storage": {
                "models": {"size": "1Gi", "accessModes": ["ReadWriteOnce", "ReadOnlyMany"], "readOnly": False}
            }
        },
        "storage.models.accessModes has no mode with which pods on several nodes can use the claim",
    ),
    "Kueue without a queue": ({"gang": {"scheduler": "kueue"}}, "gang.queue is empty: set it to a LocalQueue"),
}

NOT_INSTALLED = {
    "the Prometheus operator": {"monitoring": {"operator": "always"}},
    "KEDA": {"autoscaling": {"reward": SCALER | {"scaler": "keda"}}},
    "cert-manager": {"tls": {"mode": "certManager"}},
    "Volcano": {"gang": {"scheduler": "volcano"}},
    "the scheduler plugins": {"gang": {"scheduler": "coscheduling"}, "pods": {"schedulerName": "plugins"}},
}


@pytest.mark.parametrize(("values", "words"), SENTENCES.values(), ids=SENTENCES)
def test_contradicting_values_are_refused_with_what_to_change(values: dict[str, Any], words: str) -> None:
    [said] = refusals(values)
    assert words in said


# What the job alone decides, and JSON Schema cannot say: the first pod refuses it, and `rolemesh check` does.
BY_THE_FIRST_POD: dict[str, tuple[dict[str, Any], str]] = {
    "a role in two groups": (
        {"placement": {"strategy": "custom", "groups": CUSTOM["groups"] | {"c": ["critic"]}}},
        "critic is listed 2 times (b, c); list it once",
    ),
    "a role in no group": (
        {"placement": {"strategy": "custom", "groups": {"a": ["actor", "rollout", "reward"]}}},
        "no group has critic, which this job needs; add it to a group",
    ),
    "ranks of nobody": (
        {"placement": {"ranks": {"actors": 2}}},
        "placement.ranks names 'actors', which is no group and no role; groups are actor, rollout, reference",
    ),
    "ranks of roles that share a pod": (
        {
            "placement": {"strategy": "split-collocate", "ranks": {"critic": 2}},
            "job": {"reward": {"reward_model": {"enable": True}}},
            "roles": {"critic": {"gpus": 2}},
        },
        "placement.ranks differ in group scoring (critic 2, reward 1)",
    ),
    "ranks where the policy generates": (
        {"placement": {"ranks": {"rollout": 2}}, "roles": {"rollout": {"gpus": 2}}},
        "placement.ranks is 2 for group rollout, which has the rollout alone; set placement.replicas.rollout",
    ),
    "an engine over several ranks of a group": (
        {
            "placement": {"strategy": "hybrid", "ranks": {"policy": 2}},
            "job": {"rollout": {"name": "vllm", "tensor_model_parallel_size": 2}},
            "roles": {"actor": {"gpus": 2}},
        },
        "rollout.tensor_model_parallel_size is 2, but group policy has 2 ranks (placement.ranks), each with",
    ),
}


@pytest.mark.parametrize(("values", "words"), BY_THE_FIRST_POD.values(), ids=BY_THE_FIRST_POD)
def test_what_the_job_alone_decides_is_refused_by_the_first_pod(values: dict[str, Any], words: str) -> None:
    [config] = [each for each in objects(values) if each["metadata"]["name"] == "demo-job"]
    with pytest.raises(InvalidConfig, match=re.escape(words)):
        make_job(yaml.safe_load(config["data"]["job.yaml"]))
    found, _ = check_values(values)
    assert [words in said for said in found] == [True]


STRATEGIES = "collocate, custom, hybrid, split-collocate, standalone"
GROUP_NAMES = (
    "placement.groups: name groups with lower-case letters, digits and hyphens, at most 24 characters, and not "
    "controller or check"
)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (
            {"strategy": "hibrid"},
            "at '/placement/strategy': value must be one of 'collocate', 'custom', 'hybrid', "
            "'split-collocate', 'standalone'",
        ),
        ({"strategy": None}, f"placement.strategy is not set: set it to one of {STRATEGIES}"),
        (
            {"strategy": "custom", "groups": {"a": ["actor", "judge"]}},
            "at '/placement/groups/a/1': value must be one of 'actor', 'rollout', 'reference', 'critic', "
            "'reward', 'environment'",
        ),
        ({"strategy": "custom", "groups": {"A": ["actor"]}}, GROUP_NAMES),
        ({"strategy": "custom", "groups": {"a" * 25: ["actor"]}}, GROUP_NAMES),
        ({"strategy": "custom", "groups": {"controller": ["actor"]}}, GROUP_NAMES),
        ({"strategy": "custom", "groups": {"check": ["actor"]}}, GROUP_NAMES),
    ],
    ids=json.dumps,
)
def test_a_placement_of_unknown_names_is_refused_with_the_known_ones(
    placement: dict[str, Any], words: str
) -> None:
    assert refusals({"placement": placement}) == [words]


def test_no_release_is_without_roles_when_helm_skips_the_schema() -> None:
    program = helm()
    assert program
    command = [
        program,
        "template",
        "demo",
        str(CHART),
        "--kube-version",
        KUBERNETES,
        "--skip-schema-validation",
    ]
    for strategy in ("hibrid", "custom", "null"):
        ran = run_go(*command, "--set", f"placement.strategy={strategy}")
        said = strategy.replace("null", "<nil>")
        assert f"placement.strategy is {said}, which has no groups: set another strategy" in ran.stderr


def test_a_role_without_values_has_no_resources_and_no_gpus() -> None:
    """A null takes the chart's default out."""
    found = workloads(objects({"roles": {"reward": None}}))
    [reward] = [each for each in found if each["metadata"]["name"] == "demo-reward"]
    [container] = reward["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"ephemeral-storage": "1Gi"}}


@pytest.mark.parametrize(("what", "values"), NOT_INSTALLED.items(), ids=NOT_INSTALLED)
def test_values_that_need_a_missing_kind_are_refused(what: str, values: dict[str, Any]) -> None:
    assert f": install {what}, or set it to " in refusal(values, apis=())
    template(values)


def test_a_release_whose_name_no_service_can_have() -> None:
    assert "lower-case letters, digits and '-', a letter first" in refusal({}, release="1st.job")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"job": {"trainer": {"sav_freq": 5}}},
            "at '/job/trainer': additional properties 'sav_freq' not allowed",
        ),
        ({"job": {"rollout": {"val_kwargs": {"topk": 5}}}}, "at '/job/rollout/val_kwargs': additional.*'topk'"),
        ({"job": {"actor": {"clip_ratio": 0}}}, "at '/job/actor/clip_ratio'"),
        ({"job": {"actor": {"ppo_epochs": "two"}}}, "at '/job/actor/ppo_epochs'"),
        ({"placements": {}}, "additional properties 'placements' not allowed"),
        ({"pods": {"toleration": []}}, "at '/pods': additional"),
        ({"autoscaling": {"actor": SCALER}}, "at '/autoscaling': additional properties 'actor' not allowed"),
        ({"placement": {"replicas": {"actor": 2}}}, "at '/placement/replicas': additional properties 'actor'"),
        ({"storage": {"models": {"size": "ten"}}}, "at '/storage/models/size'"),
        ({"storage": {"models": {"accessModes": []}}}, "at '/storage/models/accessModes': minItems"),
        # In objects of Kubernetes a number or a boolean is no text.
        ({"pods": {"env": [{"name": "X", "value": 1}]}}, "at '/pods/env/0/value': got number, want string"),
        ({"pods": {"env": [{"value": "1"}]}}, "at '/pods/env/0': missing property 'name'"),
        (
            {"controller": {"env": [{"name": "X", "value": True}]}},
            "at '/controller/env/0/value': got boolean, want string",
        ),
        (
            {"groups": {"reward": {"envFrom": [{"prefix": 1}]}}},
            "at '/groups/reward/envFrom/0/prefix': got number",
        ),
        (
            {"pods": {"volumes": [{"name": "a", "csi": {"driver": "d", "volumeAttributes": {"a": 1}}}]}},
            "at '/pods/volumes/0/csi/volumeAttributes/a': got number, want string",
        ),
        (
            {"pods": {"volumeMounts": [{"name": "a", "mountPath": "/a", "readOnly": "yes"}]}},
            "at '/pods/volumeMounts/0/readOnly': got string, want boolean",
        ),
        (
            {"pods": {"volumes": [{"name": "a", "secret": {"defaultMode": 2**53}}]}},
            "at '/pods/volumes/0/secret/defaultMode': maximum: got ",
        ),
        (
            {"networkPolicy": {"metricsFrom": [{"podSelector": {"matchLabels": {"a": 1}}}]}},
            "at '/networkPolicy/metricsFrom/0/podSelector/matchLabels/a': got number, want string",
        ),
        (
            {"rewardFunction": {"egress": [{"to": [{"ipBlock": {"cidr": 10}}]}]}},
            "at '/rewardFunction/egress/0/to/0/ipBlock/cidr': got number, want string",
        ),
        (
            {
                "autoscaling": {
                    "reward": SCALER | {"metrics": [{"type": "Pods", "pods": {"metric": {"name": 1}}}]}
                }
            },
            "at '/autoscaling/reward/metrics/0/pods/metric/name': got number, want string",
        ),
    ],
)
def test_values_of_another_form_are_refused_by_the_schema(values: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        template(values)


def test_no_text_has_a_second_line() -> None:
    """In which somebody could hide another key: names, paths, labels and what they are called."""
    several = {".".join(key) for key in generate.SEVERAL_LINES}
    anything = {".".join(key) for key in generate.ANY_TEXT}
    nodes = [(path, node) for path, node in _walk(json.loads(schema()), ()) if path not in anything]
    texts = [(p, n) for p, n in nodes if n["type"] == "string" and not n.keys() & {"enum", "const"}]
    assert len(texts) > 50
    for path, node in texts:
        also = [constraint["pattern"] for constraint in node.get("allOf", ())]
        of_kubernetes = path.startswith("Kubernetes")
        expected = generate.LINES if path in several or of_kubernetes else generate.ONE_LINE
        assert expected in (node["pattern"], *also), path
    for path, node in nodes:
        if _is_open(node):
            assert node["propertyNames"]["pattern"] == generate.ONE_LINE, path
            assert node["additionalProperties"] is not True, path


def test_no_depth_has_room_for_an_unknown_key() -> None:
    """But what is a map of the user's own names, and objects of a Kubernetes that may be newer."""
    root = yaml.safe_load(schema())
    found = {path for path, node in _walk(root, ()) if _is_open(node)}
    open_ones = {path for path in found if not path.startswith("Kubernetes")}
    own = {
        "Resources.requests",
        "Resources.limits",
        *("PlacementConfig.groups", "PlacementConfig.ranks"),
        "Values.groups",
        *("CustomRewardConfig.reward_kwargs", "MultiTurnConfig.mcp_servers", "McpServerConfig.headers"),
        *(f"{section}.options" for section in ("AlgorithmConfig", "PolicyLossConfig", "RolloutConfig")),
        *("AlgorithmConfig.page_options", "RewardConfig.options", "DataConfig.options"),
        "DataConfig.apply_chat_template_kwargs",
    }
    pods = ("labels", "annotations", "nodeSelector")
    labels = {f"{of}.{key}" for of in ("PodValues", "GroupValues", "ControllerValues") for key in pods}
    rest = {"GpuValues.nodeSelector", "MonitoringValues.labels", "Values.global", "TlsValues.secrets"}
    rest |= {"DashboardsValues.labels", "DashboardsValues.annotations", "AccountValues.annotations"}
    assert open_ones == own | labels | rest


def _walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list):
        for item in node:
            yield from _walk(item, path)
    elif isinstance(node, dict):
        if "type" in node or "properties" in node:
            yield ".".join(path), node
        for name, model in node.get("$defs", {}).items():
            yield from _walk(model, (name,))
        for name, field in node.get("properties", {}).items():
            yield from _walk(field, (path[0] if path else "Values", name))
        for key in ("anyOf", "items", "additionalProperties"):
            yield from _walk(node.get(key), path)


def _is_open(node: Any) -> bool:
    return node["type"] == "object" and node.get("additionalProperties", True) is not False


def test_generated_files_are_fresh() -> None:
    stale = [path.name for path, text in generated().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run make chart"


def test_values_yaml_says_every_value_and_its_default_once() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert Values.model_validate(values) == Values()
    written = Values().model_dump(mode="json", by_alias=True, exclude={"job", "groups", "controller"})
    assert _keys(written) <= _keys(values)
    plain = [line for line in text.splitlines() if re.match(r"^\s*[a-z]\w*:\s*\S", line) and "#" not in line]
    assert len(plain) < 36, plain


def _keys(tree: Any, path: str = "") -> set[str]:
    if not isinstance(tree, dict):
        return {path}
    return {path}.union(*(_keys(value, f"{path}.{key}") for key, value in tree.items()))


def test_helm_reads_decimals_from_set_json_and_text_from_set() -> None:
    """A number with a point is a number with --set-json and text with --set."""
    program = helm()
    assert program
    command = [program, "template", "demo", str(CHART), "--kube-version", KUBERNETES]
    for value in ("1e-6", "0.000001"):
        number = f"job.actor.optim.lr={value}"
        rendered = run_go(*command, "--set-json", number)
        assert "lr: 1e-06" in rendered.stdout
        refused = run_go(*command, "--set", number)
        assert "'/job/actor/optim/lr': got string, want number" in refused.stderr
