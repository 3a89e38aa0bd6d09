"""What every section of the job file is: typed, frozen, and an error for what it does not know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from rolemesh.errors import InvalidConfig

# Where the names of other systems' job files went.
ELSEWHERE = {
    "actor_rollout_ref": "its parts are the top-level sections actor, rollout and reference, and actor.model",
    "ref": "the section is called reference",
    "model": "each role has its own: actor.model, reference.model, critic.model, reward.reward_model.model",
    "reward_model": "it is reward.reward_model",
    "custom_reward_function": "it is reward.custom_reward_function",
}


class Config(BaseModel):
    """A section of the job file. Unknown keys are errors; a section is not changed after it is made."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=False, validate_default=True, allow_inf_nan=False
    )


class _Loader(yaml.SafeLoader):
    """YAML, but 1_5, of which YAML 1.1 makes 15, is text, as two bounds are. 10_000 stays a number."""


def _unless_two(read: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A number, unless an underscore in it is not one between thousands."""
    two = re.compile(r"_(?![0-9]{3}(?![0-9]))")
    return lambda loader, node: node.value if two.search(node.value) else read(loader, node)


_Loader.add_constructor("tag:yaml.org,2002:int", _unless_two(yaml.SafeLoader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", _unless_two(yaml.SafeLoader.construct_yaml_float))


def _parse(text: str) -> Any:
    return _Loader(text).get_single_data()


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        InvalidConfig: no such file, not YAML, or not a mapping.
    """
    try:
        data = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidConfig(f"no such job file: {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise InvalidConfig(f"{path} is not YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise InvalidConfig(f"{path} should hold sections (actor:, data:, …); it holds a {type(data).__name__}")
    return data


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
        try:
            value = _parse(text)
        except yaml.YAMLError as error:
            raise InvalidConfig(f"override {override!r}: the value is not YAML: {error}") from error
        if isinstance(value, str):
            value = _number(value)
        node = tree
        *parents, leaf = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise InvalidConfig(f"override {override!r} contradicts another one above it")
        node[leaf] = value
    return merge(files, tree)


def _number(text: str) -> str | float:
    """YAML 1.1 reads 1e-5 as text; people mean the number."""
    try:
        return float(text) if text[:1] in "+-.0123456789" and "_" not in text else text
    except ValueError:
        return text


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
    """pydantic's findings, a line each, with the nearest valid key or value for an unknown one."""
    lines = []
    for finding in error.errors():
        path = [part for part in finding["loc"] if isinstance(part, str)]
        key = ".".join(map(str, finding["loc"]))
        if finding["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r}{_hint(schema, path)}")
        elif finding["type"] == "literal_error":
            lines.append(f"{key!r} is {finding['input']!r}{_choice(finding)}")
        elif finding["type"] == "missing":
            lines.append(f"{key!r} is missing and has no default")
        elif finding["type"] == "value_error":
            lines.append(f"{key}: {finding['ctx']['error']}" if key else str(finding["ctx"]["error"]))
        else:
            lines.append(f"{key!r} is {finding['input']!r}: {finding['msg']}")
    return InvalidConfig(f"{where}: " + "; ".join(lines))


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
