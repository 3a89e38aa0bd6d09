"""The tables of every configuration key, from the types and descriptions in rolemesh/config/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from rolemesh.catalog.catalog import Catalog
from rolemesh.catalog.plugin_imports import NAMED
from rolemesh.config import JobConfig
from rolemesh.config.job_sections import KEY_FACTS
from rolemesh.config.key_facts import AtResume

BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
TYPES = {"string": "text", "integer": "integer", "boolean": "true or false", "null": "null"}

Schema = Mapping[str, Any]


def tables() -> str:
    """One heading and one table for each section of the job file, in the order of its types."""
    schema = _schema()
    return "\n".join(_section(schema, schema["$defs"], ""))


@cache
def _schema() -> Schema:
    return JobConfig.model_json_schema()


def _section(section: Schema, known: Schema, prefix: str) -> Iterator[str]:
    below = {name: known[_section_of(key)] for name, key in section["properties"].items() if "$ref" in key}
    if prefix:
        yield f"{'#' * (prefix.count('.') + 1)} {prefix[:-1]}\n"
    if prefix and "description" in section:
        yield " ".join(section["description"].split()) + "\n"
    keys = {name: key for name, key in section["properties"].items() if name not in below}
    if keys:
        yield "| key | type | default | meaning | another value at a resume |\n|-|-|-|-|-|"
        for name, key in keys.items():
            default = json.dumps(key["default"], ensure_ascii=False)
            kind = _names(NAMED[prefix + name], key) if prefix + name in NAMED else _type(key)
            meaning = key.get("description", "")
            cells = (f"`{name}`{{ #{prefix}{name} }}", kind, f"`{default}`", meaning, _resume(prefix + name))
            yield "| " + " | ".join(_cell(text) for text in cells) + " |"
        yield ""
    for name, inner in below.items():
        if meaning := section["properties"][name].get("description"):
            inner = {**inner, "description": f"{meaning[0].upper()}{meaning[1:]}."}
        yield from _section(inner, known, f"{prefix}{name}.")


def _resume(key: str) -> str:
    said = {
        AtResume.REFUSED: "is refused",
        AtResume.WARNED: "causes a warning",
        AtResume.DERIVED: "is refused, if another setting, data or weights follow from it",
        AtResume.UNCOMPARED: "is not compared, though numbers change",
        AtResume.FREE: "",
    }
    return said[KEY_FACTS[key].at_resume]


def _section_of(key: Schema) -> str:
    return str(key["$ref"]).rpartition("/")[2]


def _names(catalog: Catalog[Any], key: Schema) -> str:
    return ", ".join(f"`{name}`" for name in catalog) + ", or a plug-in's" + ", or null" * ("anyOf" in key)


def _type(key: Schema) -> str:
    """As a person would say it: "integer > 0, or null"."""
    if "$ref" in key:
        section = _schema()["$defs"][_section_of(key)]
        return "section with " + ", ".join(f"`{name}`" for name in section["properties"])
    if "anyOf" in key:
        options = [_type(option) for option in key["anyOf"]]
        return " or ".join(option for option in options if option != "null") + ", or null" * ("null" in options)
    if "enum" in key:
        return ", ".join(f"`{value}`" for value in key["enum"])
    if "const" in key:
        return f"`{key['const']}`"
    if key["type"] == "array":
        inner = key.get("items")
        return f"list of {_type(inner)}" if inner else f"list of {len(key['prefixItems'])} numbers"
    if key["type"] == "object":
        if "properties" in key:
            (values,) = {_type(value) for value in key["properties"].values()}
            return f"mapping from {', '.join(f'`{name}`' for name in key['properties'])} to {values}"
        values = key["additionalProperties"]
        return "mapping from text to " + ("anything" if values is True else _type(values))
    bounds = [f"{sign}\N{NO-BREAK SPACE}{key[bound]:g}" for bound, sign in BOUNDS.items() if bound in key]
    return f"{TYPES.get(key['type'], key['type'])} {' and '.join(bounds)}".strip()


def _cell(text: str) -> str:
    return text.replace("|", "&#124;").replace("<think>", "`<think>`")
