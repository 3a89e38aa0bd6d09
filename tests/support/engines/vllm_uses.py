"""What the engine takes from vLLM: names, attributes and calls, read from the engine's own source.

A value counts as vLLM's if its type says so: an annotation with a name that is imported from vLLM (also under
TYPE_CHECKING), or a call of such a name. Annotations of arguments, returned values, variables and attributes
count; of a container, those of its elements do.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from syntax_trees import parsed

ENGINE = Path(__file__).parents[3] / "services" / "rollout" / "engines" / "vllm"
WORKER = "vllm.v1.worker.gpu_worker:Worker"  # whose methods RolloutExtension has besides its own, on a GPU
MIXIN = "RolloutExtension"
# Functions that call a method of the workers, and which of their arguments name one.
REMOTE = {"collective_rpc": (0,), "_on_all_ranks": (0,), "_move": (0, 1)}
CONTAINERS = {"list", "Iterable", "Iterator", "AsyncIterator", "AsyncGenerator", "Sequence"}


@dataclass(frozen=True)
class Call:
    num_positional: int
    keywords: frozenset[str]
    whole: bool = True  # False: more arguments come, in a tuple


@dataclass(frozen=True)
class Use:
    """`name` of `owner`: of a module, or of a class as module:Class."""

    where: str  # file:line
    owner: str
    name: str
    call: Call | None = None
    optional: bool = False  # asked for by hasattr or getattr


@dataclass
class Sources:
    """The engine's files, parsed, by name."""

    files: dict[str, ast.Module]
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tree in self.files.values():
            self.functions |= {
                node.name: node
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }


def read_engine(changed: dict[str, str] | None = None) -> Sources:
    """Parse the engine's files; `changed` has the text of some by name."""
    texts = {path.name: path.read_text() for path in sorted(ENGINE.glob("*.py"))} | (changed or {})
    return Sources({name: parsed(text) for name, text in texts.items()})


def uses_of(sources: Sources) -> list[Use]:
    """Return every use of vLLM by the engine.

    Raises:
        ValueError: a call passes keywords, or names a method, in a way that cannot be seen.
    """
    return [use for name in sources.files for use in _File(name, sources).uses()]


class _File:
    """The uses of one file. A type is the expression of an annotation."""

    def __init__(self, name: str, sources: Sources) -> None:
        self.name, self.sources, self.tree = name, sources, sources.files[name]
        self.imported: dict[str, str] = {}  # name here: module:name there
        self.attributes: dict[str, ast.expr] = {}  # of this file's classes, by name
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                self.imported |= {
                    alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names
                }
            if isinstance(node, ast.ClassDef):
                self.attributes |= dict(_annotated_attributes(node))
        self.types: dict[str, ast.expr] = {}  # of the names of the function that is read

    def uses(self) -> Iterator[Use]:
        for node in ast.walk(self.tree):
            yield from self._of_imports_and_texts(node)
        for function in ast.walk(self.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                self.types = self._types_in(function)
                for node in ast.walk(function):
                    yield from self._of_expression(node)
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and node.name == MIXIN:
                yield from self._of_mixin(node)

    def _use(
        self, node: ast.AST, owner: str, name: str, call: Call | None = None, optional: bool = False
    ) -> Use:
        return Use(f"{self.name}:{getattr(node, 'lineno', 0)}", owner, name, call, optional)

    def _of_imports_and_texts(self, node: ast.AST) -> Iterator[Use]:
        """Imported names, modules that are named in a text (loggers), and variables of the environment."""
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield self._use(node, str(node.module), alias.name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"vllm(\.\w+)+", node.value):
                package, _, module = node.value.rpartition(".")
                yield self._use(node, package, module)
            if re.fullmatch(r"VLLM_\w+", node.value):
                yield self._use(node, "vllm.envs", node.value)

    def _of_mixin(self, node: ast.ClassDef) -> Iterator[Use]:
        """What the extension takes from the worker whose class it becomes a part of."""
        own = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        own |= {name for name, _ in _assigned_attributes(node)}
        for each in ast.walk(node):
            named = each.func if isinstance(each, ast.Call) else each
            if isinstance(named, ast.Attribute) and _dotted(named.value) == "self" and named.attr not in own:
                call = self._passed(each) if isinstance(each, ast.Call) else None
                yield self._use(each, WORKER, named.attr, call)

    # ------------------------------------------------------------------------------ expressions

    def _of_expression(self, node: ast.AST) -> Iterator[Use]:
        if isinstance(node, ast.Attribute):
            for owner in self._classes(node.value):
                yield self._use(node, owner, node.attr)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict):  # a TypedDict
            for owner in self._named(node.annotation):
                call = Call(0, frozenset(_constant_keys(node.value)))
                yield self._use(node, *owner.split(":"), call)
        if isinstance(node, ast.Call):
            yield from self._of_call(node)

    def _of_call(self, node: ast.Call) -> Iterator[Use]:
        name = _dotted(node.func).rpartition(".")[2]
        if name in ("hasattr", "getattr") and isinstance(node.args[1], ast.Constant):
            for owner in self._classes(node.args[0]):
                yield self._use(node, owner, str(node.args[1].value), optional=True)
        elif isinstance(node.func, ast.Name) and node.func.id in self.imported:
            owner, _, name = self.imported[node.func.id].partition(":")
            yield self._use(node, owner, name, self._passed(node))
        elif isinstance(node.func, ast.Attribute):
            for owner in self._classes(node.func.value):
                yield self._use(node, owner, node.func.attr, self._passed(node))
        if name in REMOTE:
            yield from self._of_remote_call(node, name)

    def _of_remote_call(self, node: ast.Call, function: str) -> Iterator[Use]:
        """Methods of vLLM's worker that a text names."""
        extension = {item.name for tree in self.sources.files.values() for item in _methods_of(tree, MIXIN)}
        for argument in [node.args[i] for i in REMOTE[function] if i < len(node.args)]:
            if isinstance(argument, ast.Constant):
                if argument.value not in extension:
                    rest = node.args[max(REMOTE[function]) + 1 :]
                    starred = any(isinstance(each, ast.Starred) for each in rest)
                    call = Call(len(rest) - starred, frozenset(), whole=not starred)
                    yield self._use(node, WORKER, str(argument.value), call)
            elif not isinstance(argument, ast.Name) or not self._forwarded(argument.id):
                raise ValueError(f"{self.name}:{node.lineno}: which method of the workers is called?")

    def _forwarded(self, name: str) -> bool:
        """Whether a name is an argument of a function in REMOTE, whose calls name the methods."""
        functions = (self.sources.functions.get(function) for function in REMOTE)
        return any(name in {arg.arg for arg in function.args.args} for function in functions if function)

    def _passed(self, node: ast.Call) -> Call:
        starred = sum(isinstance(argument, ast.Starred) for argument in node.args)
        keywords = {keyword.arg for keyword in node.keywords if keyword.arg}
        for keyword in node.keywords:
            if keyword.arg is None:
                keywords |= self._keys(keyword.value)
        return Call(len(node.args) - starred, frozenset(keywords), whole=not starred)

    def _keys(self, expression: ast.expr) -> set[str]:
        """Return the keys of a dict that is passed as keywords: a variable, or what a function returns."""
        if isinstance(expression, ast.Name):
            values = [value for name, value in _assignments(self.tree) if name == expression.id]
            found = {key for value in values for key in self._keys(value)}
        elif isinstance(expression, ast.Call) and _dotted(expression.func) in self.sources.functions:
            found = self._keys_in(self.sources.functions[_dotted(expression.func)])
        else:
            found = _constant_keys(expression)
        if not found:
            raise ValueError(f"{self.name}:{expression.lineno}: which keywords does this pass?")
        return found

    def _keys_in(self, function: ast.AST) -> set[str]:
        """Return every text that a function uses as a key of a dict, also from a table of its module."""
        found = _constant_keys(function)
        tables = {
            name: value
            for tree in self.sources.files.values()
            for name, value in _assignments(tree)
            if isinstance(value, ast.Dict)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.DictComp):
                table = tables[ast.unparse(node.generators[0].iter).removesuffix(".items()")]
                found |= {str(value.value) for value in table.values if isinstance(value, ast.Constant)}
        return found

    # ------------------------------------------------------------------------------------ types

    def _classes(self, expression: ast.expr) -> list[str]:
        """Return the classes of vLLM that an expression's value may have, or the name that is imported."""
        if isinstance(expression, ast.Name) and expression.id in self.imported:
            return [self.imported[expression.id]]
        annotation = self._type(expression)
        return [] if annotation is None or _elements(annotation) else self._named(annotation)

    def _named(self, annotation: ast.expr) -> list[str]:
        names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]
        return [self.imported[name] for name in names if name in self.imported]

    def _type(self, expression: ast.expr) -> ast.expr | None:
        if isinstance(expression, ast.Name):
            return self.types.get(expression.id)
        if isinstance(expression, ast.Attribute):
            return self.attributes.get(expression.attr) if not self._classes(expression.value) else None
        if isinstance(expression, ast.Await):
            return self._type(expression.value)
        if isinstance(expression, ast.Subscript):
            container = self._type(expression.value)
            return _element(container) if container is not None else None
        if isinstance(expression, ast.Call):
            if isinstance(expression.func, ast.Name) and expression.func.id in self.imported:
                return expression.func
            function = self.sources.functions.get(_dotted(expression.func).removeprefix("self."))
            return function.returns if function else None
        return None

    def _types_in(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self.types = {each.arg: each.annotation for each in arguments if each.annotation}
        for node in ast.walk(function):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.types[node.target.id] = node.annotation
            elif isinstance(node, ast.Assign):
                self._bind_value(node.targets[0], node.value)
            elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
                self._bind_elements(node.target, node.iter)
        return self.types

    def _bind_value(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, its_value in zip(target.elts, value.elts, strict=True):
                self._bind_value(each, its_value)
        else:
            self._bind(target, self._type(value))

    def _bind_elements(self, target: ast.expr, iterable: ast.expr) -> None:
        if isinstance(iterable, ast.Call) and _dotted(iterable.func) == "enumerate":
            assert isinstance(target, ast.Tuple)
            self._bind_elements(target.elts[1], iterable.args[0])
        else:
            container = self._type(iterable)
            self._bind(target, _element(container) if container is not None else None)

    def _bind(self, target: ast.expr, annotation: ast.expr | None) -> None:
        if isinstance(target, ast.Name) and annotation is not None:
            self.types[target.id] = annotation
        elif isinstance(target, ast.Tuple) and annotation is not None:
            for each, its_type in zip(target.elts, _elements(annotation), strict=False):
                self._bind(each, its_type)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _elements(annotation: ast.expr) -> list[ast.expr]:
    """Return the types within list[A] or tuple[A, B]; none if it is not such a type."""
    if not isinstance(annotation, ast.Subscript) or _dotted(annotation.value) not in CONTAINERS | {"tuple"}:
        return []
    inner = annotation.slice
    return inner.elts if isinstance(inner, ast.Tuple) else [inner]


def _element(annotation: ast.expr) -> ast.expr | None:
    elements = _elements(annotation)
    return elements[0] if elements else None


def _annotated_attributes(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and annotation of `name: T` in the body of a class, and of `self.name: T` in its methods."""
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign):
            if isinstance(each.target, ast.Attribute):
                yield each.target.attr, each.annotation
            elif each in node.body and isinstance(each.target, ast.Name):
                yield each.target.id, each.annotation


def _assigned_attributes(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for each in ast.walk(node):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                if isinstance(target, ast.Attribute) and _dotted(target.value) == "self":
                    yield target.attr, each.value


def _methods_of(tree: ast.Module, name: str) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from (item for item in node.body if isinstance(item, ast.FunctionDef))


def _assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _constant_keys(tree: ast.AST) -> set[str]:
    """Return the texts that are keys of a dict's display, or under which something is stored."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript):
            found |= {target.slice.value} if isinstance(target.slice, ast.Constant) else set()
    return {key for key in found if isinstance(key, str)}
