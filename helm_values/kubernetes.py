"""Types of the Kubernetes API in the chart's schema, so `helm install` says what the API server would refuse.

YAML reads `value: 1` as a number, where a container's variable needs text. The types come from Kubernetes' own
schemas. Keys that they do not have are passed on: a newer cluster may know them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import kubernetes_validate
from pydantic import Field

from rolemesh.config.base import MAX_WHOLE

VERSION = "1.34.0"
NAMED = "kubernetes"  # the key under which a field's schema names its type, until `typed` resolves it

# Passed on as they are. A pod of the level `restricted` may have no volume of another source than SOURCES.
UNTYPED = ("PersistentVolumeClaimTemplate", "FieldsV1", "ManagedFieldsEntry")
SOURCES = {"configMap", "csi", "downwardAPI", "emptyDir", "persistentVolumeClaim", "projected", "secret"}


def _named(name: str) -> Any:
    return Field(json_schema_extra={NAMED: name})


EnvVar = Annotated[dict[str, Any], _named("core.v1.EnvVar")]
EnvFromSource = Annotated[dict[str, Any], _named("core.v1.EnvFromSource")]
Volume = Annotated[dict[str, Any], _named("core.v1.Volume")]
VolumeMount = Annotated[dict[str, Any], _named("core.v1.VolumeMount")]
Affinity = Annotated[dict[str, Any], _named("core.v1.Affinity")]
MetricSpec = Annotated[dict[str, Any], _named("autoscaling.v2.MetricSpec")]
Behavior = Annotated[dict[str, Any], _named("autoscaling.v2.HorizontalPodAutoscalerBehavior")]
EgressRule = Annotated[dict[str, Any], _named("networking.v1.NetworkPolicyEgressRule")]
Peer = Annotated[dict[str, Any], _named("networking.v1.NetworkPolicyPeer")]


@cache
def _definitions() -> dict[str, Any]:
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{VERSION}-local"
    text = (folder / "_definitions.json").read_text(encoding="utf-8")
    definitions: dict[str, Any] = json.loads(text)["$defs"]
    return definitions


def typed(node: Any, into: dict[str, Any], texts: str, keys: str) -> None:
    """Replace the named types of a schema by references, in place.

    Args:
        node: a schema.
        into: gets the definitions of the types, by the names in the references.
        texts: the pattern of a text in an object of Kubernetes.
        keys: the pattern of a key of the user there.
    """
    if isinstance(node, list):
        for item in node:
            typed(item, into, texts, keys)
    elif isinstance(node, dict):
        if name := node.pop(NAMED, None):
            for key in ("type", "additionalProperties", "propertyNames"):
                node.pop(key, None)
            node["$ref"] = _define(f"io.k8s.api.{name}", into, texts, keys)
        for value in list(node.values()):
            typed(value, into, texts, keys)


def _define(full: str, into: dict[str, Any], texts: str, keys: str) -> str:
    """Add the definition of a type, and of those that it refers to, and return a reference to it."""
    short = full.rpartition(".")[2]
    if short in UNTYPED:
        return "#/$defs/Kubernetes"
    name = f"Kubernetes{short}"
    if name not in into:
        found = _definitions()[full]
        if short == "Volume":
            fields = found["properties"]
            found = found | {"properties": {key: fields[key] for key in fields if key in {"name", *SOURCES}}}
        into[name] = {}  # a type may refer to itself
        into[name] = _converted(found, into, texts, keys)
    return f"#/$defs/{name}"


def _converted(node: dict[str, Any], into: dict[str, Any], texts: str, keys: str) -> dict[str, Any]:
    if "$ref" in node:
        return {"$ref": _define(node["$ref"].rpartition("/")[2], into, texts, keys)}
    if "oneOf" in node:  # a quantity, or a port: a number or text
        return {"anyOf": [_converted(option, into, texts, keys) for option in node["oneOf"]]}
    kind = node["type"][0] if isinstance(node["type"], list) else node["type"]
    made: dict[str, Any] = {"type": kind}
    if kind == "string":
        made["pattern"] = texts
    elif kind == "integer":  # Helm would change larger ones
        made |= {"minimum": -MAX_WHOLE, "maximum": MAX_WHOLE}
    elif kind == "array":
        made["items"] = _converted(node["items"], into, texts, keys)
    elif kind == "object":
        fields = node.get("properties", {})
        made["properties"] = {key: _converted(field, into, texts, keys) for key, field in fields.items()}
        if "required" in node:
            made["required"] = node["required"]
        more = node.get("additionalProperties")
        made["additionalProperties"] = (
            _converted(more, into, texts, keys) if isinstance(more, dict) else {"$ref": "#/$defs/Kubernetes"}
        )
        made["propertyNames"] = {"pattern": keys}
    return made
