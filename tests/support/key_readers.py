"""Who reads which key of the job file: found in the sources by the types that they declare; nothing runs."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from syntax_trees import parsed

import rolemesh.config
from rolemesh.config import Config

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "rolemesh" / "config"
FILES = [
    path
    for room in ("rolemesh", "services")
    for path in sorted((ROOT / room).rglob("*.py"))
    if not path.is_relative_to(ROOT / "rolemesh" / "v1")
]
for module in pkgutil.iter_modules(rolemesh.config.__path__, "rolemesh.config."):
    importlib.import_module(module.name)


def subclasses(of: type) -> Iterator[type]:
    for child in of.__subclasses__():
        yield child
        yield from subclasses(child)


SECTIONS: dict[str, type[Config]] = {
    c.__name__: c for c in subclasses(Config) if c.__module__.startswith("rolemesh.")
}


BINDING = (
    *(ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.comprehension, ast.For),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda),
)


@functools.cache
def walked(statement: ast.stmt) -> tuple[list[Any], list[ast.Attribute]]:
    """The nodes of a statement that bind a name, and its attributes. Sources looks at each three times."""
    nodes = [*ast.walk(statement)]
    return [n for n in nodes if isinstance(n, BINDING)], [n for n in nodes if isinstance(n, ast.Attribute)]


class Sources:
    """Which attributes of which section classes are read, and where.

    A type is the name of a class. It is followed through annotations (of arguments, fields, results), through
    assignments and through attributes of classes that hold a section.
    """

    def __init__(self) -> None:
        self.attributes: dict[str, dict[str, str]] = defaultdict(dict)  # of classes: attribute to type
        self.results: dict[str, str] = {}  # of functions: type
        self.reads: dict[tuple[str, str], set[str]] = defaultdict(set)  # (class, attribute) to readers
        self.trees = {path: parsed(path.read_text()) for path in FILES}
        for name, section in SECTIONS.items():
            for field, info in section.model_fields.items():
                self.attributes[name][field] = self.named(str(info.annotation))
        for _ in range(3):  # an attribute's type may come from another one's
            self.reads.clear()
            for path, tree in self.trees.items():
                self.module(path, tree)

    def named(self, annotation: str) -> str:
        """The section, or the class that holds one, that an annotation names."""
        words = re.findall(r"[A-Za-z_]\w*", annotation)
        return next((word for word in words if word in SECTIONS or word in self.attributes), "")

    def module(self, path: Path, tree: ast.Module) -> None:
        where = str(path.relative_to(ROOT))
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.class_(where, node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.function(where, node, {}, f"{where}: {node.name}")
            else:
                self.statements(where, [node], {})

    def class_(self, where: str, node: ast.ClassDef) -> None:
        if node.name in SECTIONS and not where.startswith("rolemesh/config/"):
            raise AssertionError(f"{where} has another {node.name}")
        for base in node.bases:
            self.attributes[node.name] |= self.attributes.get(ast.unparse(base), {})
        for item in node.body:
            if (
                isinstance(item, ast.AnnAssign)
                and node.name not in SECTIONS
                and (kind := self.named(ast.unparse(item.annotation)))
            ):
                self.attributes[node.name][ast.unparse(item.target)] = kind
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                reader = (
                    f"{node.name}.{item.name}" if node.name in SECTIONS else f"{where}: {node.name}.{item.name}"
                )
                if node.name in SECTIONS and any("validator" in ast.unparse(d) for d in item.decorator_list):
                    reader = "check"
                if node.name in SECTIONS and item.name.startswith("_check"):
                    reader = "check"
                if item.returns and (kind := self.named(ast.unparse(item.returns))):
                    self.attributes[node.name][item.name] = kind
                self.function(where, item, {"self": node.name}, reader)

    def function(self, where: str, node: Any, env: dict[str, str], reader: str) -> None:
        env = dict(env)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation and (kind := self.named(ast.unparse(argument.annotation))):
                env[argument.arg] = kind
        if node.returns and (kind := self.named(ast.unparse(node.returns))):
            self.results[node.name] = kind
        self.statements(reader, node.body, env)

    def statements(self, reader: str, body: list[ast.stmt], env: dict[str, str]) -> None:
        for statement in body:
            binding, attributes = walked(statement)
            for node in binding:
                if isinstance(node, ast.Assign) and len(node.targets) == 1:
                    self.bind(reader, node.targets[0], node.value, env)
                elif isinstance(node, ast.NamedExpr):
                    self.bind(reader, node.target, node.value, env)
                elif isinstance(node, ast.AnnAssign) and (kind := self.named(ast.unparse(node.annotation))):
                    self.give(node.target, kind, env)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    for argument in node.args.args:
                        if argument.annotation and (kind := self.named(ast.unparse(argument.annotation))):
                            env[argument.arg] = kind
                elif isinstance(node, ast.comprehension | ast.For):
                    self.bind(reader, node.target, node.iter, env)
            for node in attributes:
                self.type_of(reader, node, env)

    def bind(self, reader: str, target: ast.expr, value: ast.expr, env: dict[str, str]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self.bind(reader, one, other, env)
        elif kind := self.type_of(reader, value, env):
            self.give(target, kind, env)

    def give(self, target: ast.expr, kind: str, env: dict[str, str]) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = kind
        elif (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and target.value.id == "self"
        ):
            self.attributes[env.get("self", "")][target.attr] = kind

    def type_of(self, reader: str, node: ast.expr, env: dict[str, str]) -> str:
        match node:
            case ast.Name(id=name):
                return env.get(name, "")
            case ast.Attribute(value=value, attr=attribute):
                owner = self.type_of(reader, value, env)
                if owner in SECTIONS and isinstance(node.ctx, ast.Load):
                    self.reads[owner, attribute].add(reader)
                return self.attributes.get(owner, {}).get(attribute, "")
            case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(attribute)), *_]):
                return self.type_of(reader, ast.Attribute(of, attribute, ast.Load()), env)
            case ast.Call(func=ast.Name(id=name)):
                return self.results.get(name, name if name in self.attributes else "")
            case ast.Call(func=ast.Attribute(value=value, attr="model_copy" | "get" | "values")):
                return self.type_of(reader, value, env)
            case ast.Call(func=function):
                return self.type_of(reader, function, env)
            case ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self.type_of(reader, value, env)
            case ast.IfExp(body=body, orelse=orelse):
                return self.type_of(reader, body, env) or self.type_of(reader, orelse, env)
            case ast.BoolOp(values=values):
                return next((kind for value in values if (kind := self.type_of(reader, value, env))), "")
        return ""

    def readers(self, section: type[Config], attribute: str, seen: frozenset[str] = frozenset()) -> set[str]:
        """Who reads it outside the schema's own checks; of a property of the schema, who reads the property."""
        found: set[str] = set()
        for owner in (c.__name__ for c in section.__mro__ if c.__name__ in SECTIONS):
            for reader in self.reads.get((owner, attribute), ()):
                class_, _, method = reader.partition(".")
                if reader == "check" or reader in seen:
                    continue
                if class_ in SECTIONS:
                    for heir in (SECTIONS[class_], *subclasses(SECTIONS[class_])):
                        found |= self.readers(heir, method, seen | {reader})
                else:
                    found.add(reader)
        return found


def keys(section: type[Config], prefix: str = "") -> Iterator[tuple[str, type[Config], str]]:
    """Every leaf of the schema: its dotted key, the class of its section and the field's name."""
    for name, info in section.model_fields.items():
        options = (info.annotation, *typing.get_args(info.annotation))
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if inner is None:
            yield prefix + name, section, name
        else:
            yield from keys(inner, f"{prefix}{name}.")  # type: ignore[arg-type]
