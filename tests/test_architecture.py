"""The arrows between the parts, and what nobody may use. Read from the sources, without importing them."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from syntax_trees import parsed

ROOT = Path(__file__).parents[1]
# Not benchmarks/, which measures pickle to show what it costs.
SOURCES = [p for room in ("rolemesh", "services") for p in sorted((ROOT / room).rglob("*.py"))]
OURS = [path for path in SOURCES if path.parent != ROOT / "rolemesh" / "v1"]
# rolemesh/services is a link to services/, which is installed under that name.
SERVICES = {path.parent.name for path in (ROOT / "services").glob("*/__init__.py")}
TOGETHER = {"processes", "command_line"}  # put services together

# Each reads code from bytes, or a shell's language from text.
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# They run what they are sent, without any rights.
SANDBOX = {ROOT / "rolemesh" / "sandbox" / name for name in ("inside.py", "interpreter_inside.py")}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "os.system", "os.popen", "yaml.load"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path.read_text())))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of the modules that a file imports, anywhere in it, also those for types alone."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names: list[str] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += (f"{module}.{alias.name}" for alias in node.names)
    return tuple(names)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_arrows_go_from_services_to_the_library(path: Path) -> None:
    """`rolemesh/__main__.py` is the command line's other name; `rolemesh/python_interface.py` and
    `rolemesh/__init__.py` offer the Python interface. Nobody takes a service by a name that another
    package may have."""
    assert [name for name in imports(path) if name.split(".")[0] == "services"] == []
    if path.is_relative_to(ROOT / "rolemesh") and path not in (
        ROOT / "rolemesh" / "__init__.py",
        ROOT / "rolemesh" / "__main__.py",
        ROOT / "rolemesh" / "python_interface.py",
    ):
        assert [name for name in imports(path) if name.startswith("rolemesh.services")] == []


@pytest.mark.parametrize("path", [p for p in OURS if p.parts[len(ROOT.parts)] == "services"], ids=name_of)
def test_services_never_import_each_other(path: Path) -> None:
    """A service may import itself; what puts services together may import them."""
    rooms = path.relative_to(ROOT / "services").parts[:-1]
    if not rooms or rooms[0] in TOGETHER:
        return
    others = {f"rolemesh.services.{other}" for other in SERVICES - {rooms[0]}}
    assert [name for name in imports(path) if ".".join(name.split(".")[:3]) in others] == []


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_no_module_executes_received_data(path: Path) -> None:
    assert [name for name in imports(path) if name.split(".")[0] in FORBIDDEN_MODULES] == []
    calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
    forbidden = FORBIDDEN_CALLS - {"exec"} if path in SANDBOX else FORBIDDEN_CALLS
    assert [dotted(call.func) for call in calls if dotted(call.func) in forbidden] == []
    shells = [keyword for call in calls for keyword in call.keywords if keyword.arg == "shell"]
    assert [keyword.value.lineno for keyword in shells] == []


def name_as_imported(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("rolemesh", *parts) if parts[0] == "services" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions and those for types alone counted."""
    modules = {name_as_imported(path): path for path in OURS}
    arrows = {}
    for module, path in modules.items():
        named = {name if name in modules else name.rpartition(".")[0] for name in imports(path)}
        arrows[module] = named & modules.keys() - {module}
    cycles = TopologicalSorter(arrows)
    cycles.prepare()  # raises CycleError, which names the modules of one


def test_what_tests_share_is_imported_by_the_name_of_its_file() -> None:
    """Each folder of modules in tests/support is on the path of pytest, and no name is there twice."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    support = ROOT / "tests" / "support"
    folders = {path.parent for path in support.rglob("*.py") if "external" not in path.parts}
    modules = [folder for folder in folders if not (folder / "__init__.py").exists()]
    assert {name_of(folder) for folder in modules} == {
        p for p in settings["pythonpath"] if p.startswith("tests/")
    }
    names = Counter(path.name for folder in modules for path in folder.glob("*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_workers_do_no_grpc_and_servicers_do_no_torch() -> None:
    for path in OURS:
        if path.name == "worker.py":
            assert not [name for name in imports(path) if name.split(".")[0] == "grpc"], name_of(path)
        if path.name == "servicer.py":
            assert not [name for name in imports(path) if name.split(".")[0] == "torch"], name_of(path)


def test_a_context_of_a_call_has_a_type() -> None:
    """Servicers derive from rolemesh/rpc/serving/servicers.py, whose methods take one."""
    untyped = [
        f"{name_of(path)}:{node.lineno}"
        for path in OURS
        for node in nodes(path)
        if isinstance(node, ast.arg) and node.arg == "context"
        if node.annotation is None or ast.unparse(node.annotation) == "Any"
    ]
    assert untyped == []


def test_a_batch_reaches_a_model_by_one_check() -> None:
    """A worker computes what it is given. Under every placement processes/serve.py alone makes workers, each
    for its servicer, from the catalog of roles; and the guard looks at its batches once
    (tests/test_batch_validation.py tries every method)."""
    made = re.compile("(Actor|Critic|Reference|Reward|Rollout)Worker|load_role")
    makers, askers = set(), set()
    for path in OURS:
        for node in nodes(path):
            if isinstance(node, ast.Call) and any(
                made.fullmatch(dotted(part).split(".")[-1])
                for part in (node.func, *node.args)
                if isinstance(part, ast.Name | ast.Attribute)
            ):
                makers.add(name_of(path))
            if isinstance(node, ast.Attribute) and dotted(node).endswith("validator.check_request"):
                askers.add(name_of(path))
    assert makers == {"services/processes/serve.py"}
    assert askers == {"rolemesh/rpc/batches.py"}


def test_every_prometheus_name_is_in_one_file() -> None:
    kinds = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
    users = {p for p in OURS for name in imports(p) if name.rpartition(".")[0] == "prometheus_client"
             and name.rpartition(".")[2] in kinds}  # fmt: skip
    assert users == {ROOT / "rolemesh" / "telemetry" / "metrics.py"}


def test_there_is_no_python_beside_the_proto_files() -> None:
    """Another package owns the name `proto`."""
    assert list((ROOT / "proto").rglob("*.py")) == []


def test_every_package_has_a_docstring() -> None:
    rooms = {path.parent for path in OURS}
    for room in sorted(rooms):
        init = room / "__init__.py"
        if init.exists():
            assert ast.get_docstring(parsed(init.read_text())), f"{name_of(init)} says nothing"
