"""The mark `processes`: which tests are heavy, because they start processes.

Two heavy tests never run at once (`heavy_scheduling.py`). A process counts if it costs as much as a role: a
Python that may import torch, a fork of the test process, an engine, a rank, Ray, Prometheus. Those that take
tenths of a second and import no torch do not count: LITTLE ones, which code under test starts for a request,
and Helm's renders.

A test gets the mark if its code, or that of a fixture, can reach the start of a process through names. They are
followed through `tests/` and `benchmarks/`, but not into STARTERS_OF_LITTLE. Where that does not suffice, the
test has `@pytest.mark.processes`. A test without the mark fails if it starts a process that counts, and the
failure names that process. Forks by a server of forks are seen through names alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import multiprocessing.context
import multiprocessing.process
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

FOLDERS = ("tests", "benchmarks")  # where names are followed
CACHED = type(functools.cache(len))
STARTERS: tuple[object, ...] = (
    *(os.fork, os.forkpty, os.posix_spawn, os.posix_spawnp, os.system, os.popen),
    *(subprocess.Popen, subprocess.run, subprocess.call, subprocess.check_call, subprocess.check_output),
    *(asyncio.create_subprocess_exec, asyncio.create_subprocess_shell),
    *(multiprocessing.Process, multiprocessing.Pool, multiprocessing.get_context),
    concurrent.futures.ProcessPoolExecutor,
)
# What these modules define starts processes, or engines that do.
STARTING_MODULES = {
    "vllm_rollouts",
    *(f"rolemesh.services.processes.{name}" for name in ("fork_server", "launchers", "role_processes")),
}

# In the command of a Python that imports no torch: a judge, a sandbox, a program's parent, a reader, a trial.
LITTLE = (
    "rolemesh.services.reward.scoring_process",
    "rolemesh.sandbox.inside",
    "process_group.py",
    "data/column_process.py",
    "data/template_process.py",
)
STARTERS_OF_LITTLE = {"rendering.run_go"}  # functions of the tests that start nothing else
PROGRAMS = {"rolemesh", "ray", "prometheus", "promtool", "make", "uv", "pip"}
FORKING = {"os.fork", "os.forkpty", "os.posix_spawn", "multiprocessing.start"}


# ------------------------------------------------------------------------------- the mark


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folders = tuple(f"{config.rootpath / folder}{os.sep}" for folder in FOLDERS)
    starts = functools.cache(functools.partial(starts_processes, folders=folders, light={}))
    for item in items:
        if any(starts(function) for function in functions_of(item)):
            item.add_marker(pytest.mark.processes)


def functions_of(item: pytest.Item) -> Iterator[Callable[..., Any]]:
    """Yield the test's function, those of its fixtures, and those among its parameters."""
    if not isinstance(item, pytest.Function):
        return
    yield item.obj.hypothesis.inner_test if hasattr(item.obj, "hypothesis") else item.obj
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        yield from (definition.func for definition in definitions)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    yield from (value for value in parameters if isinstance(value, FunctionType | functools.partial))


def starts_processes(function: Callable[..., Any], folders: tuple[str, ...], light: dict[int, object]) -> bool:
    """Return whether the function can reach the start of a process through names.

    Args:
        function: a test or a fixture.
        folders: the code that is followed.
        light: what is known to reach none, by its id; what this function reaches is added if it reaches none.
    """
    waiting: list[object] = [function]
    seen: dict[int, object] = {}  # with the objects, as the id of one that is gone is used again
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or id(thing) in light:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, FunctionType) and f"{thing.__module__}.{thing.__name__}" in STARTERS_OF_LITTLE:
            continue
        if (
            any(thing is starter for starter in STARTERS)
            or isinstance(thing, multiprocessing.context.BaseContext)
            or (isinstance(thing, type | FunctionType) and thing.__module__ in STARTING_MODULES)
        ):
            return True
        waiting += _named_by(thing, folders)
    light |= seen
    return False


def _named_by(thing: object, folders: tuple[str, ...]) -> Iterable[object]:
    """The objects that a function or class refers to."""
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, MethodType | staticmethod | classmethod):
        return [thing.__func__]
    if isinstance(thing, property):
        return [thing.fget, thing.fset]
    if isinstance(thing, dict | list | tuple):
        values = thing.values() if isinstance(thing, dict) else thing
        return [value for value in values if callable(value)]
    if isinstance(thing, type):
        file = getattr(sys.modules.get(thing.__module__), "__file__", None) or ""
        return [*vars(thing).values(), *thing.__bases__] if file.startswith(folders) else []
    if isinstance(thing, FunctionType | CACHED) and hasattr(thing, "__wrapped__"):  # by a decorator
        return [thing.__wrapped__]
    if not isinstance(thing, FunctionType) or not thing.__code__.co_filename.startswith(folders):
        return []
    names = _names(thing.__code__)
    found = [thing.__globals__[name] for name in names if name in thing.__globals__]
    modules = [vars(module) for module in found if isinstance(module, ModuleType)]
    found += [module[name] for module in modules for name in names if name in module]
    return found + [cell.cell_contents for cell in thing.__closure__ or ()]


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """The names in a function's code, and in that of the functions that it defines."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


# ------------------------------------------------------------------------------- tests without it

_started: list[str] = []  # the processes that count, of the running test


def counts(command: Sequence[str]) -> bool:
    program = Path(command[0]).name
    if program.startswith("python"):
        return not any(little in word for word in command[1:] for little in LITTLE)
    return program in PROGRAMS


def _notice(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        program, words = arguments[:2]
        command = [os.fsdecode(word) for word in ([words] if isinstance(words, str | bytes) else words)]
        if counts([os.fsdecode(program), *command[1:]]):
            _started.append(" ".join(command))
    elif event in FORKING:
        _started.append(event)


def _audited(start: Callable[..., None]) -> Callable[..., None]:
    """Python audits no start by multiprocessing."""

    @functools.wraps(start)
    def wrapper(process: Any) -> None:
        sys.audit("multiprocessing.start")
        start(process)

    return wrapper


def pytest_configure() -> None:
    multiprocessing.process.BaseProcess.start = _audited(multiprocessing.process.BaseProcess.start)  # type: ignore[method-assign]
    sys.addaudithook(_notice)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _started.clear()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    if _started and not item.get_closest_marker("processes"):
        pytest.fail(
            f"without the mark `processes`, {item.nodeid} started: {'; '.join(_started)[:2000]}", pytrace=False
        )
