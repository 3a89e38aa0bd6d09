"""Makes the tools that a job names: by name, in verl's YAML file, or on MCP servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import Parameter, iscoroutinefunction, signature
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic_core import to_jsonable_python
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from rolemesh.agents.tools import BaseTool, FunctionSchema, ToolResponse, ToolSchema, WrongArguments
from rolemesh.catalog.tools import TOOLS
from rolemesh.config import JobConfig
from rolemesh.config.rollout import MultiTurnConfig
from rolemesh.config.yaml_file import one_line, read_yaml
from rolemesh.errors import InvalidConfig
from rolemesh.services.environment.timeouts import Threads
from rolemesh.services.environment.tools.argument_schema import Arguments

TOOLS_PATH = "rollout.multi_turn.tool_config_path"
# Classes of verl that have a counterpart here, for jobs written for verl where it is not installed.
COUNTERPARTS = {"verl.tools.gsm8k_tool.Gsm8kTool": "rolemesh.services.environment.tools.gsm8k_tool.Gsm8kTool"}
# Type hints without arguments of their own that transformers knows. It describes any other as an object.
KNOWN_HINTS = (int, float, str, bool, NoneType, list, tuple, dict, Any)


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool's call."""

    text: str
    reward: float = 0.0


def tools_of(job: JobConfig) -> dict[str, BaseTool]:
    """Return the job's tools by name.

    These are the tools of rollout.multi_turn.tools, then those of its tool_config_path and mcp_servers.

    Raises:
        InvalidConfig: a tool cannot be made, has no valid schema, or two have one name.
    """
    settings = job.rollout.multi_turn
    threads = Threads()
    made = [_named(name, job, threads) for name in settings.tools]
    if settings.tool_config_path is not None:
        made += tools_in(Path(settings.tool_config_path))
    if settings.mcp_servers:
        made += _of_servers(settings)
    tools: dict[str, BaseTool] = {}
    for tool in made:
        schema_of(tool)
        if tools.setdefault(tool.name, tool) is not tool:
            raise InvalidConfig(f"rollout.multi_turn names two tools {tool.name!r}; leave one out")
    return tools


def _of_servers(settings: MultiTurnConfig) -> list[BaseTool]:
    try:
        from rolemesh.services.environment.mcp_tools.tool import mcp_tools
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"rollout.multi_turn.mcp_servers needs {error.name}: pip install 'rolemesh[mcp]', or add it to the "
            "image (docs/environments.md)"
        ) from error
    return mcp_tools(settings)


def _named(name: str, job: JobConfig, threads: Threads) -> BaseTool:
    spec = TOOLS[name]
    with spec.errors_named():
        code: Any = spec.load()
        if not isinstance(code, type):
            return FunctionTool(name, code, threads)
        tool: BaseTool = code(job) if spec.of_job else code({}, None)
        return tool


def tools_in(file: Path) -> list[BaseTool]:
    """Make the tools of a YAML file in verl's form: `tools`, a list of class_name, config and tool_schema.

    Raises:
        InvalidConfig: the file cannot be read, or a tool cannot be made; the message names both.
    """
    made: list[BaseTool] = []
    entries = entries_of(file, TOOLS_PATH, "tools", ("class_name", "config", "tool_schema"))
    for index, entry in enumerate(entries):
        where = f"{file}: tool {index + 1}"
        schema = entry.get("tool_schema")
        cls = class_of(entry, where, COUNTERPARTS)
        try:
            parsed = None if schema is None else ToolSchema.model_validate(schema)
            made.append(cls(entry.get("config") or {}, parsed))
        except Exception as error:
            raise InvalidConfig(f"{where}, {entry['class_name']}: {one_line(_said(error))}") from error
    return made


def entries_of(file: Path, setting: str, key: str, known: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the list under a key of a YAML file.

    Args:
        file: the file.
        setting: the key of the job file that names it.
        key: of the list.
        known: the keys that a section of the list may have.

    Raises:
        InvalidConfig: the file cannot be read, it has no list of sections, or a section has another key.
    """
    try:
        entries = read_yaml(file).get(key)
    except InvalidConfig as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise InvalidConfig(f"{setting}: {error}") from error
        raise InvalidConfig(
            f"{setting}: there is no file {file.absolute()}; correct the path, or write there the list {key}: "
            f"of sections with {', '.join(known)}"
        ) from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidConfig(f"{file}: {key} should be a list of sections with {', '.join(known)}")
    for entry in entries:
        if unknown := entry.keys() - set(known):
            raise InvalidConfig(f"{file}: unknown key {min(unknown)!r} in {key}; there are {', '.join(known)}")
    return entries


def class_of(entry: Mapping[str, Any], where: str, counterparts: Mapping[str, str]) -> Callable[..., Any]:
    """Import the class that `class_name` names, as package.module.Class.

    Args:
        entry: a section of the file.
        where: its place, for errors.
        counterparts: our class for each class of verl that has one. It is used if verl is not installed.

    Raises:
        InvalidConfig: there is no such class, or it cannot be imported.
    """
    path = entry.get("class_name")
    if not isinstance(path, str) or "." not in path:
        raise InvalidConfig(f"{where}: class_name is {path!r:.100}; package.module.Class expected")
    try:
        return _imported(path)
    except ModuleNotFoundError as error:
        if path in counterparts:
            return _imported(counterparts[path])
        raise InvalidConfig(
            f"{where}: {path} cannot be imported: {error}; install its package, or set PYTHONPATH to its folder"
        ) from error
    except Exception as error:
        raise InvalidConfig(f"{where}: {path} cannot be imported: {_said(error)}") from error


def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


# ----------------------------------------------------------------------------------- functions


class FunctionTool(BaseTool):
    """A function as a tool. Its arguments are checked against its schema.

    A function that is not async runs on a thread.

    Args:
        name: of the tool.
        function: its signature and docstring describe the arguments. Its `*args` and `**kwargs` are not
            offered. Arguments with hints that JSON does not have, such as a date, are not checked.
        threads: run the function.

    Raises:
        InvalidConfig: its type hints or its docstring do not describe the arguments.
    """

    def __init__(self, name: str, function: Callable[..., Any], threads: Threads) -> None:
        try:
            schema = get_json_schema(function)["function"]
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise InvalidConfig(
                f"tool {name}: {one_line(str(error))} A tool's function has type hints, and a docstring that "
                "begins with what it does and has each argument under Args:"
            ) from error
        parameters = _named_only(schema["parameters"], function)
        described = FunctionSchema(name=name, description=schema["description"], parameters=parameters)
        super().__init__({}, ToolSchema(type="function", function=described))
        self._function = function
        self._threads = threads
        try:
            self._arguments = Arguments(_with_null(_checked(parameters, get_type_hints(function))))
        except ValueError as error:
            raise InvalidConfig(
                f"tool {name}: its type hints have no JSON schema: {one_line(str(error))}; use text, numbers, "
                "lists and dicts"
            ) from error

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        try:
            signature(self._function).bind(**parameters)
        except TypeError as error:
            expected = ", ".join(self.tool_schema.function.parameters.get("properties", {}))
            raise WrongArguments(f"{error}; the arguments are {expected or 'none'}") from None
        self._arguments.check(parameters)
        if iscoroutinefunction(self._function):
            answer = await self._function(**parameters)
        else:
            answer = await self._threads.run(partial(self._function, **parameters))
        return ToolResponse(text=_text_of(answer)), 0.0, {}


def _named_only(parameters: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments without `*args` and `**kwargs`, which no call names."""
    variadic = {
        name
        for name, parameter in signature(function).parameters.items()
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    }
    named = {name: part for name, part in parameters["properties"].items() if name not in variadic}
    required = [name for name in parameters.get("required", ()) if name not in variadic]
    plain = {key: part for key, part in parameters.items() if key != "required"}
    return {**plain, "properties": named, **({"required": required} if required else {})}


def _checked(parameters: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments without those whose hints transformers does not know."""
    known = {name: part for name, part in parameters["properties"].items() if _is_known(hints[name])}
    return {**parameters, "properties": known}


def _is_known(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is None:
        return hint in KNOWN_HINTS
    return origin is Literal or all(_is_known(part) for part in get_args(hint))


def _with_null(schema: Any) -> Any:
    """Return a schema in which null is a type where transformers writes OpenAPI's `nullable`."""
    if isinstance(schema, list):
        return [_with_null(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _with_null(part) for key, part in schema.items()}
    if plain.get("nullable") is not True:  # a dict: the argument of that name
        return plain
    if "type" in plain:
        types = plain["type"]
        plain["type"] = [*(types if isinstance(types, list) else [types]), "null"]
    for key, null in (("anyOf", {"type": "null"}), ("enum", None)):
        if key in plain:
            plain[key] = [*plain[key], null]
    return plain


# --------------------------------------------------------- classes, of verl's shape and its older one


async def started(tool: BaseTool, instance_id: str, create_kwargs: Mapping[str, Any]) -> None:
    """Create a tool's instance for an episode.

    verl's newer tools take create_kwargs as one argument, its older ones take each of them.
    """
    takes_more = any(p.kind is Parameter.VAR_KEYWORD for p in signature(tool.create).parameters.values())
    more = {"create_kwargs": dict(create_kwargs)} if takes_more and create_kwargs else {}
    await tool.create(instance_id, **more, **create_kwargs)


async def executed(
    tool: BaseTool, instance_id: str, parameters: dict[str, Any], execute_kwargs: Mapping[str, Any]
) -> ToolResult:
    """Run a call of a tool, and return its answer with its reward.

    Raises:
        WrongArguments: a text in the arguments is no UTF-8 text.
        TypeError, ValueError: the tool did not return (answer, reward, numbers), or its answer is no text.
    """
    try:
        json.dumps(parameters, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        lone = error.object[error.start]
        raise WrongArguments(
            f"the arguments have {lone!r}, half of a surrogate pair; write both halves, or the character itself"
        ) from None
    returned = await tool.execute(instance_id, parameters, **execute_kwargs)
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise ValueError(f"execute should return (answer, reward, numbers); it returned {returned!r:.100}")
    answer, reward, _ = returned
    return ToolResult(_text_of(answer), 0.0 if reward is None else float(reward))


def schema_of(tool: BaseTool) -> dict[str, Any]:
    """Return a tool's schema as OpenAI's API takes it.

    Raises:
        InvalidConfig: it has no schema, or an invalid one.
    """
    try:
        given: Any = tool.tool_schema
        plain = given if isinstance(given, Mapping) else given.model_dump(exclude_unset=True, exclude_none=True)
        schema = ToolSchema.model_validate(plain)
        if schema.function.name != tool.name:
            raise ValueError(f"the schema's name is {schema.function.name!r}, and the tool's {tool.name!r}")
        if schema.function.parameters.get("type") != "object":
            raise ValueError(f"parameters should be a JSON schema of type object: {schema.function.parameters}")
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidConfig(
            f"tool {type(tool).__name__} has no valid schema: {one_line(str(error))}"
        ) from error
    return schema.to_dict()


def _text_of(answer: Any) -> str:
    """Return an answer as text: itself, its `text`, or JSON. None is the empty text.

    Raises:
        TypeError: it is none of these.
        ValueError: it has half of a surrogate pair, which no UTF-8 text has.
    """
    said = getattr(answer, "text", answer)
    if said is None:
        return ""
    if not isinstance(said, str):
        try:
            said = json.dumps(said, ensure_ascii=False, default=_in_json)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"the tool's return value {answer!r:.100} ({type(answer).__name__}) is neither a text nor "
                f"JSON: {error}"
            ) from error
    try:
        said.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the tool's return value {answer!r:.100} is no UTF-8 text: {error.reason} at character "
            f"{error.start}"
        ) from error
    return str(said)


def _in_json(value: Any) -> Any:
    """Return a value that JSON does not have as one that it has: a date as text, an array as a list."""
    if hasattr(value, "tolist"):  # of NumPy or torch
        return value.tolist()
    if isinstance(value, set | frozenset):  # in an order that does not change from process to process
        return sorted(value, key=lambda each: json.dumps(each, default=_in_json))
    return to_jsonable_python(value)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
