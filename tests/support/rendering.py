"""Renders the chart with Helm, and checks the result as a cluster would."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate.utils
import yaml

# placements by the name of their strategy
STRATEGIES: dict[str, Any] = {
    name: {"strategy": name} for name in ("collocate", "hybrid", "split-collocate", "standalone")
}
STRATEGIES["custom"] = {
    "strategy": "custom",
    "groups": {
        "train": ["actor", "critic"],
        "free": ["reference"],
        "rollout": ["rollout"],
        "reward": ["reward"],
    },
}

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rlhf-job"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
KUBERNETES = "1.34.0"

# The APIs of a cluster that has everything that the chart can use.
APIS = (
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "keda.sh/v1alpha1/ScaledObject",
    "cert-manager.io/v1/Certificate",
    "scheduling.x-k8s.io/v1alpha1/PodGroup",
    "scheduling.volcano.sh/v1beta1/PodGroup",
    "ray.io/v1/RayCluster",
)

# Texts that YAML takes for something else unless they are quoted.
AMBIGUOUS = ["true", "1e3", "a: b", "a #b", '"a', "*a", "a, b: c"]

Object = dict[str, Any]

# The definitions of prometheus-operator 0.85.0, KEDA 2.18.3, cert-manager 1.19.2 and scheduler-plugins 0.32.7
# (all Apache-2.0), without their descriptions.
DEFINITIONS: dict[str, Object] = json.loads((ROOT / "tests/charts/crds.json").read_text(encoding="utf-8"))

# Without the cache, the library reads a megabyte of definitions for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


@cache
def helm() -> str | None:
    """Find the program: $HELM, the one in .venv, or this machine's."""
    return os.environ.get("HELM") or shutil.which("helm", path=f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")


class Refused(Exception):
    """Helm refused the values; the message is Helm's."""


def run_go(*command: str | Path, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program written in Go, and capture its output.

    It collects no garbage, which would be a quarter of its CPU time. A render then takes 160 MiB.

    Args:
        command: the program and its arguments.
        given: its standard input.
    """
    environment = {**os.environ, "GOGC": "off"}
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, env=environment)


def template(
    values: Mapping[str, Any], *, release: str = "demo", apis: Sequence[str] = APIS, chart: Path = CHART,
    files: Sequence[Path] = (),
) -> str:  # fmt: skip
    """Render what `helm install` would send, as text.

    Raises:
        Refused: Helm refuses the values.
    """
    return _template(json.dumps(values), release, tuple(apis), chart, tuple(files))


@cache
def _template(values: str, release: str, apis: tuple[str, ...], chart: Path, files: tuple[Path, ...]) -> str:
    program = helm()
    assert program
    command = [program, "template", release, str(chart), "--namespace", "jobs", "--kube-version", KUBERNETES]
    command += [word for api in apis for word in ("--api-versions", api)]
    command += [word for file in files for word in ("--values", str(file))] + ["--values", "-"]
    ran = run_go(*command, given=values)
    if ran.returncode:
        raise Refused(ran.stderr)
    return ran.stdout


def objects(values: Mapping[str, Any], **how: Any) -> list[Object]:
    """Render what `helm install` would send, as objects."""
    return [thing for thing in yaml.load_all(template(values, **how), Loader=yaml.CSafeLoader) if thing]


def of_kind(things: Sequence[Object], *kinds: str) -> list[Object]:
    return [thing for thing in things if thing["kind"] in kinds]


def workloads(things: Sequence[Object]) -> list[Object]:
    return of_kind(things, "Deployment", "StatefulSet")


def heads(things: Sequence[Object]) -> list[Object]:
    """The RayClusters as workloads: each with the template of its head pod, which has rank 0."""
    return [thing | {"spec": thing["spec"]["headGroupSpec"]} for thing in of_kind(things, "RayCluster")]


def pods(things: Sequence[Object]) -> Iterator[Object]:
    """Yield the pod templates, and the pod of `helm test`."""
    for thing in things:
        if thing["kind"] == "Pod":
            yield thing
        elif thing["kind"] == "RayCluster":
            yield thing["spec"]["headGroupSpec"]["template"]
            yield from (group["template"] for group in thing["spec"]["workerGroupSpecs"])
        elif "template" in thing.get("spec", {}):
            yield thing["spec"]["template"]


def groups(things: Sequence[Object]) -> dict[str, tuple[str, ...]]:
    """Map each group to the roles in its processes' arguments."""
    return {
        thing["metadata"]["labels"]["app.kubernetes.io/component"]: tuple(_args(thing)[1].split(","))
        for thing in (*workloads(things), *heads(things))
    }


def _args(workload: Object) -> list[str]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    args: list[str] = container["args"]
    return args


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector, or a Service's map, selects an object with these labels."""
    matches = selector.get("matchLabels", {} if "matchExpressions" in selector else selector)
    for expression in selector.get("matchExpressions", ()):
        value, operator = labels.get(expression["key"]), expression["operator"]
        if operator == "NotIn":
            if value in expression["values"]:
                return False
        elif value is None or (operator == "In" and value not in expression["values"]):
            return False
    return matches.items() <= labels.items()


@cache
def schema_errors(text: str) -> str:
    """Check an object (JSON) against Kubernetes' schemas or a definition. Return the error; empty: none."""
    thing = json.loads(text)
    if thing["kind"] == "RayCluster":  # its definition is 2 MB of pod templates; the operator reads the rest
        templates = [template | {"apiVersion": "v1", "kind": "Pod"} for template in pods([thing])]
        named = [each | {"metadata": each["metadata"] | thing["metadata"]} for each in templates]
        return "".join(schema_errors(json.dumps(each)) for each in named)
    definition = DEFINITIONS.get(f"{thing['apiVersion']}/{thing['kind']}")
    try:
        if definition:
            jsonschema.validate(thing, _closed(definition))
        else:
            kubernetes_validate.utils.validate(thing, KUBERNETES, strict=True)
    except jsonschema.ValidationError as error:
        return f"{thing['kind']} {thing['metadata']['name']}: {error.message} at {list(error.path)}"
    return ""


def _closed(schema: Any) -> Any:
    """Return the schema with unknown keys forbidden, as the API server does."""
    if not isinstance(schema, dict):
        return [_closed(item) for item in schema] if isinstance(schema, list) else schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    elif (
        schema.get("type") == "object"
        and isinstance(schema.get("properties"), dict)
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        closed["additionalProperties"] = False
    return closed


def notes(values: Mapping[str, Any], into: Path, **how: Any) -> str:
    """Render NOTES.txt as an object of a copy of the chart, because `helm template` does not print it."""
    chart = into / "chart"
    if not chart.exists():
        shutil.copytree(CHART, chart)
        (chart / "templates" / "NOTES.txt").rename(chart / "notes.txt")
        (chart / "templates" / "notes.yaml").write_text(
            '{kind: Notes, text: {{ tpl (.Files.Get "notes.txt") . | toJson }}}'
        )
    (said,) = of_kind(objects(values, chart=chart, **how), "Notes")
    text: str = said["text"]
    return text


FINDING = re.compile(r"^ *- at '(.*?)': (.*)$", re.MULTILINE)
ABOVE = re.compile(
    "'(allOf|anyOf)' failed|validation failed|invalid propertyName|got .*, want "
)  # not what is wrong


def refused_words(values: Mapping[str, Any], **how: Any) -> str:
    """Return all that Helm prints when it refuses the values; empty if it accepts them."""
    try:
        template(values, **how)
    except Refused as refused:
        return str(refused)
    return ""


def refusals(values: Mapping[str, Any], **how: Any) -> list[str]:
    """Return each sentence with which Helm refuses the values; none if it accepts them.

    A template has one, and the schema one for each finding. A rule's begins with its place, unless that is all
    values; other words of the schema are as Helm prints them.
    """
    said = refused_words(values, **how)
    if findings := FINDING.findall(said):
        return [_sentence(*each) for each in findings if not ABOVE.match(each[1])] or [
            _sentence(*each) for each in findings
        ]
    sentence = re.sub(r".*execution error at \(.*?\): ", "", said).partition("\n\nUse --debug")[0].strip()
    return [sentence] if sentence else []


def _sentence(at: str, words: str) -> str:
    if not (rule := re.fullmatch(r"value must be '(.*)'", words)):
        return f"at '{at}': {words}"
    return f"{at.strip('/').replace('/', '.')}: {rule[1]}".removeprefix(": ")


def refusal(values: Mapping[str, Any], **how: Any) -> str:
    """Return the sentences with which Helm refuses the values, joined; empty if it accepts them."""
    return "; ".join(refusals(values, **how))
