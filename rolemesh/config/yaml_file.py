"""Read and write the YAML of jobs: job files, overrides, recorded jobs, and values on the command line.

Any input gives its content, or an error of one line that says what is wrong and where. Size, depth and the
number of values (counting repetitions by aliases) are limited. Duplicate keys are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError
from pydantic_core import to_jsonable_python
from yaml.nodes import MappingNode, Node, ScalarNode

from rolemesh.errors import InvalidConfig, unreadable

MAX_BYTES = 1 << 20  # of a file; a resolved job is about 10 kB
MAX_DEPTH = 32  # of nested lists and sections; a job has 5
MAX_VALUES = 20_000
MAX_NUMBER = 100  # characters of a number

TAGS = ("null", "bool", "int", "float", "str", "seq", "map")
# YAML 1.1 requires a point in the mantissa and a sign in the exponent; users, Helm and YAML 1.2 write 1e-6.
EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # characters that no path, process or file accepts
# Text that other systems replace by a value. A backslash before it keeps it as it is.
IN_TEXTS = re.compile(r"(\\?)(\$\{[^{}]*\})")
IN_PATHS = re.compile(r"(\\?)(\$\{[^{}]*\}|\$[A-Za-z_]\w*)")
VARIABLES = "environment variables are not replaced"
NOT_THOUSANDS = re.compile(r"_(?![0-9]{3}(?![0-9]))")


class _Error(yaml.MarkedYAMLError):
    def __init__(self, problem: str, at: Any) -> None:
        super().__init__(problem=problem, problem_mark=at.start_mark)


def _too_deep(event: yaml.Event) -> _Error:
    return _Error(f"lists and sections nest deeper than {MAX_DEPTH} levels", event)


class _Loader(yaml.SafeLoader):
    """Loads YAML 1.1 with changes: keys are text as written, and duplicate keys are errors; 1e-6 is a number;
    a date is text, and so are = and, as a value, <<. 1_5, which YAML 1.1 reads as 15, is text too, because it
    may be two bounds; 10_000 is a number.
    """

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: read
        for tag, read in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in TAGS
    }
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith((":timestamp", ":value"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._deepest = self._num_values = 0
        self._read: dict[
            Node | None, tuple[int, int]
        ] = {}  # number of values in a node and levels below it, with aliases

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        others = self._deepest
        before = self._num_values
        self._depth += 1
        self._deepest = self._depth
        if self._depth > MAX_DEPTH:  # stops the recursion
            raise _too_deep(event)
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if node not in self._read:
                raise _Error(f"*{event.anchor} refers to a value that contains it", event)
            num_values, levels = self._read[node]
            self._num_values += num_values
            self._deepest += levels
        else:
            self._num_values += 1
            self._read[node] = (self._num_values - before, self._deepest - self._depth)
        if self._num_values > MAX_VALUES:
            raise _Error(f"more than {MAX_VALUES:,} values, counting repetitions by aliases", event)
        if self._deepest > MAX_DEPTH:
            raise _too_deep(event)
        self._depth -= 1
        self._deepest = max(others, self._deepest)
        return node

    def compose_scalar_node(self, anchor: Any) -> ScalarNode:
        """Compose a key or a value. JSON writes a character beyond U+FFFF as two escapes, a surrogate pair."""
        node = super().compose_scalar_node(anchor)
        node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        if found := NO_TEXT.search(node.value):
            raise _Error(f"character {ord(found[0]):#x} cannot be in a text", node)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise _Error("a key must be a name", key)
            if key.value in lines:
                several = "; write <<: [*a, *b]" if key.value == "<<" else ""
                raise _Error(f"duplicate key {key.value!r:.80}, first in line {lines[key.value]}{several}", key)
            lines[key.value] = key.start_mark.line + 1
        return node

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, OverflowError) as error:
            raise _Error(f"{node.value!r:.80} is not a valid {node.tag.rpartition(':')[2]}", node) from error


def _number(read: Callable[[Any, ScalarNode], Any]) -> Callable[[Any, ScalarNode], Any]:
    def number(loader: _Loader, node: ScalarNode) -> Any:
        text = loader.construct_scalar(node)
        if NOT_THOUSANDS.search(text):
            return text
        if len(text) > MAX_NUMBER:
            raise _Error(f"a number of {len(text):,} characters; the limit is {MAX_NUMBER}", node)
        return read(loader, node)

    return number


def _as_written(loader: Any, node: ScalarNode) -> Any:
    return loader.construct_scalar(node)


_Loader.add_constructor("tag:yaml.org,2002:merge", _as_written)
_Loader.add_constructor("tag:yaml.org,2002:int", _number(yaml.SafeLoader.construct_yaml_int))
_Loader.add_constructor("tag:yaml.org,2002:float", _number(yaml.SafeLoader.construct_yaml_float))


class _Dumper(yaml.SafeDumper):
    """Quotes a text that _Loader would read as a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML document; error messages begin with `where`.

    Raises:
        InvalidConfig: it is not valid YAML, or exceeds a limit; the message names the line.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        problem = ", ".join(filter(None, (error.context, error.problem)))
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"character {error.character:#x} in it"
    raise InvalidConfig(one_line(f"{where}, line {line}: {problem:.300}"))


def parse_value(text: str, where: str) -> Any:
    """Parse a value on the command line; error messages begin with `where`.

    Raises:
        InvalidConfig: as parse_yaml; or it has a comment, which YAML would leave out: `run #1` would be `run`.
    """
    value = parse_yaml(text, where)
    end = 0
    for token in yaml.scan(text, Loader=_Loader):
        if "#" in text[end : token.start_mark.index]:
            raise InvalidConfig(one_line(f"{where}: # begins a comment here; put a text with a # in quotes"))
        end = token.end_mark.index
    return value


def to_yaml(sections: dict[str, Any]) -> str:
    """Write sections as YAML, in their order, such that read_yaml reads the same sections."""
    return str(yaml.dump(sections, Dumper=_Dumper, sort_keys=False))


def read_texts(tree: Any, paths: Collection[str]) -> Any:
    """Return sections in which `\\${…}` is the text `${…}`, also in keys, and in paths `\\$NAME` is `$NAME`.

    Args:
        tree: sections of a job file.
        paths: the dotted keys whose values are paths.

    Raises:
        InvalidConfig: such a text has no backslash. Other systems replace it by a value; job files do not.
    """

    def read(text: str, key: str) -> str:
        for backslash, found in _placeholders(key in paths).findall(text):
            if not backslash:
                what = "a job file has no interpolation" if found[1] == "{" else VARIABLES
                raise InvalidConfig(
                    one_line(
                        f"{key!r:.200} is {text!r:.200}: {what}, so {found:.200} would stay as it is; write "
                        f"its value there, or \\{found:.200} if this text is meant"
                    )
                )
        return _placeholders(key in paths).sub(r"\2", text)

    return _each_text(tree, read)


def write_texts(tree: Any, paths: Collection[str]) -> Any:
    """Return sections from which `read_texts` makes the given ones."""
    return _each_text(tree, lambda text, key: _placeholders(key in paths).sub(r"\\\g<0>", text))


def _placeholders(is_path: bool) -> re.Pattern[str]:
    return IN_PATHS if is_path else IN_TEXTS


def _each_text(tree: Any, change: Callable[[str, str], str], at: str = "") -> Any:
    """Change the texts of nested sections, each with its dotted key; a key's own text, too."""
    if isinstance(tree, str):
        return change(tree, at)
    if isinstance(tree, Mapping):
        changed = {}
        for name, value in tree.items():
            key = f"{at}.{name}" if at else str(name)
            new = change(name, f"the key {key}") if isinstance(name, str) else name
            changed[new] = _each_text(value, change, key)
        return changed
    if isinstance(tree, list | tuple):
        return [_each_text(value, change, at) for value in tree]
    return tree


def in_json(value: Any) -> Any:
    """Return a value as JSON and a job file have it: lists for tuples, and text for paths and for all keys.

    A set becomes a list in an order that every process finds.

    Raises:
        TypeError, ValueError: a key, or a value, has no such form.
    """
    if isinstance(value, Mapping):
        return {text: in_json(part) for key, part in value.items() for text in to_jsonable_python({key: None})}
    if isinstance(value, set | frozenset):
        return sorted(map(in_json, value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [in_json(part) for part in value]
    return to_jsonable_python(value)


def check_written(
    values: Mapping[str, Any], read: Callable[[dict[str, Any]], Mapping[str, Any]] = lambda written: written
) -> None:
    """Check that values come back from a job file as they are, since each process of a job reads them there.

    The key 1 comes back as "1", unless its type is declared. An object that no text stands for does not.

    Args:
        values: by name.
        read: returns the values that their forms in a job file stand for, or raises ValidationError.

    Raises:
        ValueError: one does not; the message begins with its name. Or `read` refuses them together.
    """
    advice = "declare a type that is read from text, or use text as keys, and text, numbers and lists as values"
    written: dict[str, Any] = {}
    for name, value in values.items():
        try:
            written[name] = in_json(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} is {value!r:.200}, which no job file holds ({error}); {advice}") from None
    try:
        again = read(written)
    except ValidationError as error:
        errors = error.errors()  # the first may be about an alias, which is no name of a value
        refused = next((each for each in errors if values.keys() & each["loc"][:1]), errors[0])
        name = next((str(part) for part in refused["loc"][:1] if part in values), "")  # none: all together
        of, given, back = (name, values[name], written[name]) if name else ("the whole", values, written)
        raise ValueError(
            f"{of} is {given!r:.200}, which a job file gives back as {back!r:.200}, and that is refused "
            f"({refused['msg']}); {advice}"
        ) from None
    for name, value in values.items():
        if name not in again or again[name] != value:
            raise ValueError(
                f"{name} is {value!r:.200}, which a job file gives back as "
                f"{again.get(name, written[name])!r:.200}; {advice}"
            )


def one_line(text: str) -> str:
    """Escape line breaks and other control characters, which may come from a quoted value."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Raises:
        InvalidConfig: the file is absent, too large, not YAML, or not a mapping; the message names file and
            line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise InvalidConfig(f"no such job file: {path}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise unreadable(InvalidConfig, error, f"{path} cannot be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise InvalidConfig(f"{path} is larger than {MAX_BYTES >> 20} MiB, the limit for a job file")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidConfig(f"{path}, line {line}: not UTF-8: {error.reason}") from error
    content = parse_yaml(text, str(path))
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise InvalidConfig(f"{path}: expected sections (actor:, data:, …); got a {kind}")
    return content
