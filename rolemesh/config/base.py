"""What every section of the job file is: typed, frozen, and an error for what it does not know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from rolemesh.config.yaml_file import EXPONENT, MAX_DEPTH, one_line, parse_yaml, read_yaml
from rolemesh.errors import InvalidConfig

# Where the names of other systems' job files went.
ELSEWHERE = {
    "actor_rollout_ref": "its parts are the top-level sections actor, rollout and reference, and actor.model",
    "ref": "the section is called reference",
    "model": "each role has its own: actor.model, reference.model, critic.model, reward.reward_model.model",
    "reward_model": "it is reward.reward_model",
    "custom_reward_function": "it is reward.custom_reward_function",
}
KINDS = {bool: "boolean", int: "number", float: "number", str: "string"}
MAX_TOLD = 20  # errors of one job


class Config(BaseModel):
    """A section of the job file. Unknown keys are errors; a section is not changed after it is made."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _kinds_stay_apart(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic takes true for 1, 1 for true, and "1" for either; the chart's schema takes neither. Its own
        strict mode would also refuse a list for a tuple, 8.0 for a whole number, as Helm may write 8, and 1e-6,
        which is text to other readers of YAML."""
        kinds = kinds_of(cls.model_fields[str(info.field_name)].annotation)
        if kinds & {"boolean", "number"}:
            for scalar in _scalars(value):
                kind = KINDS.get(type(scalar))
                if kind and kind not in kinds and not (kind == "string" and EXPONENT.match(scalar)):
                    expected = " or ".join(sorted(kinds))
                    raise PydanticCustomError("kind", f"Input should be a valid {expected}, and is a {kind}")
        return value


def kinds_of(annotation: Any) -> set[str]:
    """Which of KINDS a field takes, by itself or in a list or mapping; none where it takes anything."""
    if isinstance(annotation, type) and annotation in KINDS:
        return {KINDS[annotation]}
    return {kind for part in get_args(annotation) for kind in kinds_of(part)}


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _scalars(part)
    else:
        yield value


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """What a command line lays on its job file: other files (`configs/recipes/dapo.yaml`), each on those left
    of it, and on all of them single keys: `["trainer.save_freq=5"]` is `{"trainer": {"save_freq": 5}}`. Values
    are YAML.

    Raises:
        InvalidConfig: neither key=value nor a YAML file, or a file that cannot be read.
    """
    files: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals and override.endswith((".yaml", ".yml")):
            files = merge(files, read_yaml(Path(override)))
            continue
        if not equals or not all(part.isidentifier() for part in key.split(".")):
            raise InvalidConfig(f"override {override!r} is not of the form section.key=value, nor a .yaml file")
        value = parse_yaml(text, f"override {override!r:.200}")
        node = tree
        *parents, leaf = key.split(".")
        if len(parents) >= MAX_DEPTH:
            raise InvalidConfig(
                f"override {override!r:.200}: {len(parents) + 1} parts in a key; 5 are the most"
            )
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise InvalidConfig(f"override {override!r} contradicts another one above it")
        node[leaf] = value
    return merge(files, tree)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on it, section by section; a value of `over` replaces one of `base`."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = (
            merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def explain(error: ValidationError, schema: type[BaseModel], where: str) -> InvalidConfig:
    """pydantic's findings in one line, with the nearest valid key or value for an unknown one."""
    findings = error.errors()
    told = [_told(finding, schema) for finding in findings[:MAX_TOLD]]
    if len(findings) > MAX_TOLD:
        told.append(f"and {len(findings) - MAX_TOLD} more")
    return InvalidConfig(one_line(f"{where}: " + "; ".join(told)))


def _told(finding: ErrorDetails, schema: type[BaseModel]) -> str:
    path = [part for part in finding["loc"] if isinstance(part, str)]
    key, given = ".".join(map(str, finding["loc"])), f"{finding['input']!r:.200}"
    match finding["type"]:
        case "extra_forbidden":
            return f"unknown key {key!r:.200}{_hint(schema, path)}"
        case "literal_error":
            return f"{key!r} is {given}{_choice(finding)}"
        case "missing":
            return f"{key!r} is missing and has no default"
        case "value_error":
            reason = str(finding["ctx"]["error"])
            return f"{key}: {reason}" if key else reason
        case _:
            return f"{key!r:.200} is {given}: {finding['msg']}"


def _hint(schema: type[BaseModel], path: list[str]) -> str:
    *parents, wrong = path
    if not parents and wrong in ELSEWHERE:
        return f" ({ELSEWHERE[wrong]})"
    section: type[BaseModel] | None = schema
    for part in parents:
        section = _section(section, part) if section else None
    if section is None:
        return ""
    near = difflib.get_close_matches(wrong, section.model_fields, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {'.'.join([*parents, near[0]])!r}?"
    if far := [key for key in leaves(schema) if key.rpartition(".")[2] == wrong]:
        return f"; did you mean {far[0]!r}?"
    return f"; known here: {', '.join(section.model_fields)}"


def _choice(finding: ErrorDetails) -> str:
    """All values that a key may have, and the nearest one."""
    known = re.findall(r"'([^']*)'", finding["ctx"]["expected"])
    near = difflib.get_close_matches(str(finding["input"]), known, n=1, cutoff=0.6)
    return ", which is none of " + ", ".join(known) + "".join(f"; did you mean {name!r}?" for name in near)


def _section(schema: type[BaseModel], name: str) -> type[BaseModel] | None:
    known = schema.model_fields.get(name)
    if known is None:
        return None
    options = (known.annotation, *get_args(known.annotation))
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)


def leaves(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema."""
    for name in schema.model_fields:
        section = _section(schema, name)
        if section is None:
            yield prefix + name
        else:
            yield from leaves(section, f"{prefix}{name}.")
