"""vLLM's source, read without importing it, and what in it does not fit the engine's uses of it."""

from __future__ import annotations

import ast
import csv
import hashlib
import inspect
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import Parameter
from pathlib import Path

from syntax_trees import parsed
from vllm_uses import Call, Use

Member = tuple[str, ast.AST]  # the module, and the node that defines or assigns the name
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """The Python files below a folder that has `vllm`: site-packages, or a wheel."""

    def __init__(self, root: Path | zipfile.Path) -> None:
        self._root = root
        self.read: set[str] = set()  # the files that answers came from
        self.tree, self.member = cache(self._tree), cache(self._member)

    def _tree(self, module: str) -> ast.Module | None:
        stem = module.replace(".", "/")
        names = (f"{stem}.py", f"{stem}/__init__.py") if stem.split("/")[0] == "vllm" else ()
        for name in names:
            if (path := self._root / name).is_file():
                self.read.add(name)
                return parsed(path.read_text(encoding="utf-8"))
        return None

    def named(self, module: str, name: str) -> Member | None:
        """Find what a name of a module is, in the module from which it comes; a module has itself."""
        tree = self.tree(module)
        for node in _statements(tree) if tree else ():
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.named(_imported_from(module, node, self._is_package(module)), alias.name)
            elif name in _defined(node):
                return module, node
        within = self.tree(f"{module}.{name}")
        return (f"{module}.{name}", within) if within else None

    def _is_package(self, module: str) -> bool:
        return (self._root / module.replace(".", "/") / "__init__.py").is_file()

    def classes(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class and those of vLLM that it is made of, itself first."""
        yield module, node
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            found = self.named(module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                yield from self.classes(found[0], found[1])

    def _member(self, owner: str, name: str) -> Member | None:
        """Find a name of a module, or of a class `module:Class`: a method, or anything that is assigned."""
        module, _, class_name = owner.partition(":")
        if not class_name:
            return self.named(module, name)
        found = self.named(module, class_name)
        if found and (declared := _declared_type(found[1])):  # of an instance, or of what a function returns
            found = self.named(found[0], declared)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return None
        for its_module, node in self.classes(found[0], found[1]):
            for each in ast.walk(node):
                if name in (_defined(each) if each in node.body else _set_on_self(each)):
                    return its_module, each
        return None

    def signature(self, member: Member, *, bound: bool) -> inspect.Signature | None:
        """Return the parameters of a function, or of a class when it is called; None: it is neither."""
        module, node = member
        if isinstance(node, FUNCTION):
            decorators = {ast.unparse(each) for each in node.decorator_list}
            return _signature(node.args, skip=bound and "staticmethod" not in decorators)
        if not isinstance(node, ast.ClassDef):
            return None
        classes = list(self.classes(module, node))
        for _, each in classes:
            for item in each.body:
                if isinstance(item, FUNCTION) and item.name == "__init__":
                    return _signature(item.args, skip=True)
        fields: dict[str, Parameter] = {}
        for _, each in reversed(classes):
            fields |= {field.name: field for field in _fields(each)}
        return inspect.Signature(list(fields.values()))


def misfits(source: Source, uses: Iterable[Use]) -> list[str]:
    """Say of each use what the source has not: the name, or the parameters that it passes."""
    return [f"{use.where}: {wrong}" for use in uses if (wrong := _misfit(source, use))]


def _misfit(source: Source, use: Use) -> str:
    member = source.member(use.owner, use.name)
    if member is None:
        return "" if use.optional else f"{use.owner} has no {use.name}"
    if use.call is None:
        return ""
    refusal = _refusal(source.signature(member, bound=":" in use.owner), use.call)
    return f"{use.owner} {use.name} {refusal}" if refusal else ""


def _refusal(signature: inspect.Signature | None, call: Call) -> str:
    if signature is None:
        return "cannot be called"
    bind = signature.bind if call.whole else signature.bind_partial
    try:
        bind(*[None] * call.num_positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"refuses the call: {error}"
    return ""


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under `if` and `try` too."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If):
            waiting += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try):
            waiting += [*node.body, *(item for handler in node.handlers for item in handler.body)]


def _imported_from(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    parts = module.split(".")
    above = parts[: len(parts) - node.level + is_package] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _defined(node: ast.AST) -> set[str]:
    """Return the names that a statement gives a value or a type."""
    if isinstance(node, FUNCTION | ast.ClassDef):
        return {node.name}
    return {target.id for target in _targets(node) if isinstance(target, ast.Name)}


def _declared_type(node: ast.AST) -> str:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation).strip("'")
    return ast.unparse(node.returns).strip("'") if isinstance(node, FUNCTION) and node.returns else ""


def _set_on_self(node: ast.AST) -> set[str]:
    attributes = [target for target in _targets(node) if isinstance(target, ast.Attribute)]
    return {target.attr for target in attributes if ast.unparse(target.value) == "self"}


def _targets(node: ast.AST) -> list[ast.expr]:
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]


def _signature(arguments: ast.arguments, *, skip: bool) -> inspect.Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    found = [
        Parameter(
            each.arg,
            Parameter.POSITIONAL_ONLY if each in arguments.posonlyargs else Parameter.POSITIONAL_OR_KEYWORD,
            default=Parameter.empty if i < num_required else None,
        )
        for i, each in enumerate(positional)
    ][skip:]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(
            Parameter(each.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        )
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(found)


def _fields(node: ast.ClassDef) -> Iterator[Parameter]:
    """Yield the fields of a dataclass, a Struct or a TypedDict, as keywords."""
    none_required = any(ast.unparse(each) == "total=False" for each in node.keywords)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            kind = ast.unparse(item.annotation)
            if not kind.startswith("ClassVar"):
                optional = none_required or item.value is not None or kind.startswith("NotRequired")
                yield Parameter(
                    item.target.id, Parameter.KEYWORD_ONLY, default=None if optional else Parameter.empty
                )


def python_files(record: str) -> dict[str, str]:
    """Return vLLM's Python files with their hashes, from the file RECORD of its wheel."""
    rows = csv.reader(record.splitlines())
    return {path: digest for path, digest, _ in rows if path.startswith("vllm/") and path.endswith(".py")}


def digest_of(files: dict[str, str]) -> str:
    """Return one hash of names and contents of all files."""
    return hashlib.sha256("".join(f"{path} {files[path]}\n" for path in sorted(files)).encode()).hexdigest()
