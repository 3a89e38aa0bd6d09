"""A text of the values is one scalar of a manifest: it ends no line, brings no key, and stays a text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from rendering import AMBIGUOUS, Object, objects, of_kind, pods, refused_words, template

from helm_values.generate import LINES, schema

SCHEMA = json.loads(schema())
BREAKS = ["\n", "\r", "\x85", "\u2028", "\u2029"]  # of a line, in YAML 1.1
CONTROLS = [chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)]

OF_KUBERNETES = re.compile("/k$|/(env|volumes|volumeMounts|metrics)/0/")
GROUPS = {"/groups", "/tls/secrets"}  # the user's keys here name groups of the job

Text = Callable[
    [str, list[str]], str | None
]  # of a place in the values and its patterns; None: nothing is there


def values(text: Text, key: str = "k", node: Object = SCHEMA, at: str = "") -> Any:
    """Values with a text wherever one may be. The user's own keys are called `key`. An object of Kubernetes has
    what it must have, and one other key."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        node = SCHEMA["$defs"][name]
        if name.startswith("Kubernetes") and node.get("type") == "object":
            required = {field: node["properties"][field] for field in node.get("required", ())}
            node = node | {"properties": required}
    options = [values(text, key, option, at) for option in node.get("anyOf", ())]
    if some := [option for option in options if option is not None]:
        return some[-1]  # of a text and a list of them the list
    if node.get("type") == "array":
        item = values(text, key, node.get("items", {}), f"{at}/0")
        return None if item is None else [item]
    if node.get("type") == "object":
        fields = dict(node.get("properties", {}))
        if isinstance(node.get("additionalProperties"), dict):
            fields["reward" if at in GROUPS else key] = node["additionalProperties"]
        made = {name: values(text, key, field, f"{at}/{name}") for name, field in fields.items()}
        return {name: value for name, value in made.items() if value is not None} or None
    if "pattern" in node and not node.keys() & {"enum", "const"}:
        also = (constraint["pattern"] for constraint in node.get("allOf", ()))
        return text(at, [node["pattern"], *also])
    return None


def places() -> dict[str, list[str]]:
    """Each place of a text in the values, and its patterns."""
    found: dict[str, list[str]] = {}
    values(lambda at, patterns: found.update({at: patterns}))
    return found


def merged(base: Any, other: Any) -> Any:
    """Values laid over others; of two lists the first items are laid over one another."""
    if isinstance(base, dict) and isinstance(other, dict):
        return base | {key: merged(base.get(key), value) for key, value in other.items()}
    if isinstance(base, list) and isinstance(other, list) and base:
        return [merged(base[0], other[0])]
    return other


SCALER = {"scaler": "hpa", "maxReplicas": 2}
SCALED: Object = {"autoscaling": dict.fromkeys(("rollout", "reference", "reward", "environment"), SCALER)}


@pytest.mark.parametrize("character", BREAKS, ids=ascii)
def test_no_text_takes_the_end_of_a_line(character: str) -> None:
    said = refused_words(merged(SCALED, values(lambda at, patterns: f"a{character}b")))
    refused = set(re.findall(r"at '(\S+)': '.*' does not match pattern", said))
    found = places()
    assert len(found) > 140
    several = {at for at, patterns in found.items() if patterns == [LINES]} if character in "\n\r" else set()
    lists_too = {at for at in found if f"{at}/0" in found}
    assert refused == found.keys() - several - lists_too


def test_multiline_texts_are_scripts_and_kubernetes_objects() -> None:
    own = {at for at, patterns in places().items() if patterns == [LINES] and not OF_KUBERNETES.search(at)}
    template = "{% for message in messages %}\n{{ message.content }}\n{% endfor %}"
    assert own == {"/job/rollout/stop/0", "/job/actor/model/custom_chat_template", "/prepare/0/command/0"}
    env = {"name": "A", "value": "a\n\tb"}
    prepare = {"creates": "x", "command": ["sh", "-c", "a\n\tb\r\n"]}
    things = objects(
        {
            "job": {
                "rollout": {"stop": ["\n\n", "\r\n", " a\n\tb"]},
                "actor": {"model": {"custom_chat_template": template}},
            },
            "pods": {"env": [env]},
            "prepare": [prepare],
        }
    )
    [config] = of_kind(things, "ConfigMap")[:1]
    job = yaml.safe_load(config["data"]["job.yaml"])
    assert job["rollout"]["stop"] == ["\n\n", "\r\n", " a\n\tb"]
    assert job["actor"]["model"]["custom_chat_template"] == template
    for pod in pods(things):
        [container] = pod["spec"]["containers"]
        assert env in container["env"]
        for first in pod["spec"]["initContainers"]:
            assert first["args"][0].removeprefix("--creates=") == "x"
            assert first["args"][-3:] == prepare["command"]


def test_an_annotation_of_several_lines_arrives_as_it_is() -> None:
    texts = ["a\n\tb", "\ta", "a\r\nb\r\n", "a\n\n", "\n\n", "\n  a\n b", "a\n---\nb: c\n", "a\n# b", "a \n"]
    # Each is the last of a map once: what ends a map may be cut.
    for given in ({str(at): text for at, text in enumerate(texts)}, *({"0": text} for text in texts)):
        # A group's own take the place of those of all pods. The chart's own come before.
        own = {
            where: {f"z-{where}-{key}": text for key, text in given.items()}
            for where in ("controller", "dashboards", "pods", "reward")
        }
        things = objects(
            {
                "pods": {"annotations": own["pods"]},
                "groups": {"reward": {"annotations": own["reward"]}},
                "controller": {"annotations": own["controller"]},
                "monitoring": {"dashboards": {"annotations": own["dashboards"]}},
            }
        )
        annotated = [*pods(things), *of_kind(things, "ConfigMap")]
        said = [thing["metadata"].get("annotations", {}) for thing in annotated]
        for where, theirs in own.items():
            found = [each for each in said if theirs.keys() & each.keys()]
            assert found, where
            assert all(theirs.items() <= each.items() for each in found)


def test_every_control_character_is_refused_in_texts_and_keys() -> None:
    texts = {f"k{at}": character for at, character in enumerate(CONTROLS)}
    keys = dict.fromkeys(CONTROLS, "a")
    deep = [{"name": "a", "k": {"k": [character]}} for character in CONTROLS if character not in "\t\n\r"]
    said = refused_words({"pods": {"labels": texts, "annotations": keys, "env": deep, "affinity": {"a": keys}}})
    assert set(re.findall(r"at '/pods/labels/(\S+)': '.*' does not match pattern", said)) == texts.keys()
    assert set(re.findall(r"at '/pods/env/(\d+)/k/k/0': '.*' does not match pattern", said)) == {
        str(at) for at in range(len(deep))
    }
    assert said.count("invalid propertyName") == 2 * len(CONTROLS)


def test_a_reward_functions_code_arrives_as_it_is() -> None:
    """Whatever stands in it: a template that did not quote it would end its block."""
    code = "x = '" + "'\nadded: true\n  more: '".join(CONTROLS) + "é\ufeff'"
    path = {"path": "/etc/rolemesh-reward/reward.py"}
    things = objects({"rewardFunction": {"code": code}, "job": {"reward": {"custom_reward_function": path}}})
    assert {"reward.py": code} in [thing["data"] for thing in of_kind(things, "ConfigMap")]


# Between them these make each object that the chart has.
JOB: Object = {
    "algorithm": {"use_kl_in_reward": True},
    "critic": {"enable": True},  # of the estimator whose name is a text here
    "rollout": {"multi_turn": {"enable": True}},
    "reward": {"reward_model": {"enable": True}},
}
ACCOUNTS: Object = {key: {"create": True} for key in ("roles", "reward", "environment", "controller")}
OPERATED: Object = SCALED | {
    "serviceAccounts": ACCOUNTS,
    "tls": {"mode": "certManager", "issuerRef": {"name": "ca"}},
    "gang": {"scheduler": "volcano"},
    "monitoring": {"operator": "always"},
    "storage": {name: {"size": "1Gi"} for name in ("models", "data", "checkpoints", "caches")},
    "job": JOB,
}
OWN: Object = {
    "serviceAccounts": ACCOUNTS,
    "tls": {"mode": "secret", "secret": "keys"},
    "gang": {"scheduler": "coscheduling"},
    "pods": {"schedulerName": "plugins"},
    "autoscaling": dict.fromkeys(SCALED["autoscaling"], SCALER | {"scaler": "keda"}),
    "storage": {name: {"existingClaim": "mine"} for name in ("models", "data", "checkpoints", "caches")},
    "job": JOB,
}
HELD_AGAINST_NAMES = re.compile(  # /huggingFace/cache is a folder of a claim; test_fetching.py has it
    "/job/placement|/gpu/resource|/placement|/rewardFunction/code|/plugins/code|/image/digest|/huggingFace/cache"
)
QUANTITY = re.compile(".*/(requests|limits|size|scratch|sharedMemory)")
REFUSED = {  # beside what the values have besides
    "certManager": re.compile("/tls/secret|.*/existingClaim"),
    "secret": re.compile("/autoscaling/[a-z]*/metrics|/tls/issuerRef/group|/gang/queue"),  # KEDA counts rows
}


def filled(base: Object, text: Callable[[str], str], key: str = "k") -> Object:
    """Values with a place's text wherever it may be, with a slash before or after it if need be."""

    def fitting(at: str, patterns: list[str]) -> str | None:
        if HELD_AGAINST_NAMES.match(at) or REFUSED[base["tls"]["mode"]].match(at):
            return None
        forms = (text(at), f"/{text(at)}", f"{text(at)}/")
        if claim := re.fullmatch("(/storage/[a-z]+)/mountPath", at):  # no two have one path
            forms = (f"{claim[1]}/{text(at)}",)
        return next((form for form in forms if all(re.search(pattern, form) for pattern in patterns)), None)

    return dict(merged(base, values(fitting, key)))


def shape(thing: Any, key: str) -> Any:
    """Keys and kinds of values, without the texts; the user's own keys are called k."""
    if isinstance(thing, dict):
        fields = {"k" if name == key else name: shape(value, key) for name, value in thing.items()}
        if job := thing.get("job.yaml"):
            fields["job.yaml"] = shape(yaml.safe_load(job), key)
        return fields
    return [shape(item, key) for item in thing] if isinstance(thing, list) else type(thing).__name__


@pytest.mark.parametrize("base", [OPERATED, OWN], ids=["operated", "own"])
@pytest.mark.parametrize("text", AMBIGUOUS)
def test_a_text_stays_one_text_whatever_yaml_would_take_it_for(text: str, base: Object) -> None:
    tried = filled(base, lambda at: text, text)
    usual = filled(base, lambda at: "2" if QUANTITY.match(at) else "a", "a")
    assert shape(objects(tried), text) == shape(objects(only(usual, tried, text)), "a")


def only(usual: Any, tried: Any, text: str) -> Any:
    """Of values those that others have too, whose own keys are the text."""
    if isinstance(usual, dict):
        names = {name: text if name == "a" else name for name in usual}
        both = {name: other for name, other in names.items() if other in tried}
        return {name: only(usual[name], tried[other], text) for name, other in both.items()}
    return [only(usual[0], tried[0], text)] if isinstance(usual, list) else usual


def test_every_text_of_the_values_is_in_a_manifest() -> None:
    """Or the test above would hold nothing."""
    numbers = {at: str(1000 + number) for number, at in enumerate(places())}
    made = "".join(template(filled(base, numbers.__getitem__)) for base in (OPERATED, OWN))
    absent = {at for at, name in numbers.items() if not re.search(rf"\b{name}\b", made)}
    lists_instead = {"/job/plugins", "/job/data/train_files", "/job/data/val_files"}
    lists_instead |= {"/job/actor/model/target_modules"}
    others_instead = {"/gpu/nodeSelector/k"}
    others_instead |= {f"/roles/reward/resources/{part}/k" for part in ("requests", "limits")}
    unread = {"/global/k"}
    assert {at for at in absent if not HELD_AGAINST_NAMES.match(at)} == lists_instead | others_instead | unread
