"""Import plug-ins, so that their decorators (rolemesh/plugins.py) add to the catalogs."""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from rolemesh.catalog.agents import AGENTS
from rolemesh.catalog.call_formats import CALL_FORMATS
from rolemesh.catalog.catalog import BUILT_IN, Catalog, Declaration
from rolemesh.catalog.datasets import DATASETS
from rolemesh.catalog.engines import ENGINES
from rolemesh.catalog.estimators import ESTIMATORS
from rolemesh.catalog.pages import PAGES
from rolemesh.catalog.policy_losses import POLICY_LOSSES
from rolemesh.catalog.reward_managers import REWARD_MANAGERS
from rolemesh.catalog.tools import TOOLS
from rolemesh.catalog.user_files import spec_of_file
from rolemesh.errors import InvalidConfig, unreadable

GROUP = "rolemesh.plugins"
# The catalogs to which plug-ins add, by the key of the job file whose values are their names.
NAMED: dict[str, Catalog[Any]] = {
    "algorithm.adv_estimator": ESTIMATORS,
    "algorithm.page": PAGES,
    "actor.policy_loss.loss_mode": POLICY_LOSSES,
    "rollout.name": ENGINES,
    "rollout.agent.default_agent_loop": AGENTS,
    "rollout.multi_turn.tools": TOOLS,
    "rollout.multi_turn.format": CALL_FORMATS,
    "reward.reward_manager": REWARD_MANAGERS,
    "data.dataset": DATASETS,
}

# The origin of the plug-in that is being imported.
importing: ContextVar[str] = ContextVar("importing")


@dataclass(frozen=True)
class Plugin:
    """An imported plug-in.

    Args:
        name: as the job file has it; of an installed package its name.
        origin: what its declarations have as their origin.
        digest: of its source files, hexadecimal.
    """

    name: str
    origin: str
    digest: str


_imported: dict[str, str] = {}  # an origin to the digest that was imported


def load_plugins(names: Iterable[str]) -> list[Plugin]:
    """Import plug-ins, and those of installed packages. A file that has changed is imported again.

    Args:
        names: Python files (they end in .py) and modules.

    Raises:
        InvalidConfig: there is no such file or module, it raises, or two plug-ins declare one name.
    """
    return [*installed_plugins(), *(_load(name) for name in names)]


@cache
def installed_plugins() -> list[Plugin]:
    """Import the plug-ins of installed packages (entry point group `rolemesh.plugins`)."""
    found = []
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.name
        with _Importing(package, f"the installed plug-in {package} ({entry.value})"):
            entry.load()
        found.append(Plugin(package, package, _digest_of_module(entry.module)))
    return found


def _load(name: str) -> Plugin:
    if name.endswith(".py"):
        return _load_file(name)
    with _Importing(name, f"plugins: the module {name}"):
        import_module(name)
    # A module is imported once in a process, whatever becomes of its file.
    return Plugin(name, name, _imported.setdefault(name, _digest_of_module(name)))


def _load_file(name: str) -> Plugin:
    path = Path(name).resolve()
    if not path.is_file():
        raise InvalidConfig(f"plugins: no such file: {path}")
    origin = str(path)
    digest = _digest([path])
    if _imported.get(origin) != digest:
        forget(origin)  # should this import fail, the next job tries again
        module_name = f"rolemesh_plugin_{path.stem}_{hashlib.sha256(origin.encode()).hexdigest()[:8]}"
        spec = spec_of_file(module_name, path)
        assert spec is not None, "a .py file has a loader"
        assert spec.loader is not None, "a .py file has a loader"
        module = module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and typing look a class's module up by name
        with _Importing(origin, f"plugins: {name}"):
            spec.loader.exec_module(module)
        _imported[origin] = digest
    return Plugin(path.name, origin, digest)


def forget(origin: str) -> None:
    """Forget a plug-in's file and what it has declared. The next job that lists it imports it again."""
    _imported.pop(origin, None)
    for catalog in NAMED.values():
        catalog.remove(origin)


class _Importing:
    """Import one plug-in: its declarations get its origin, its errors become InvalidConfig."""

    def __init__(self, origin: str, said: str) -> None:
        self._origin = origin
        self._said = said

    def __enter__(self) -> None:
        self._token = importing.set(self._origin)

    def __exit__(self, kind: object, error: BaseException | None, trace: Any) -> None:
        importing.reset(self._token)
        if isinstance(error, InvalidConfig):
            raise InvalidConfig(f"{self._said}: {error}") from error
        if isinstance(error, Exception | SystemExit):
            said = f"{type(error).__name__}: {error}{self._where(error, trace)}"
            raise unreadable(InvalidConfig, error, f"{self._said} could not be imported: {said}") from error

    def _where(self, error: BaseException, trace: Any) -> str:
        """Return the plug-in's line that raised, or what to do if its first line was never reached."""
        at = traceback.extract_tb(trace)[-1]
        if not at.filename.startswith("<frozen"):  # Python's own import machinery
            return f" ({at.filename}, line {at.lineno})"
        if isinstance(error, ModuleNotFoundError):
            return "; install its package, or set PYTHONPATH to its folder"
        return ""


# --------------------------------------------------------------------------------------- digests


def _digest_of_module(name: str) -> str:
    """Return the digest of a module's file, or of every .py file of a package; "" if there is no source."""
    spec = find_spec(name)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return ""  # compiled: only its package's version identifies it
    file = Path(spec.origin)
    return _digest(sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file])


def _digest(files: Sequence[Path]) -> str:
    """Return the digest of a file's content; or of several files' content, and each one's length and place.

    Without these, text that moves from one file to the next one would not count.
    """
    whole = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        if len(files) > 1:
            place = file.relative_to(os.path.commonpath(files))
            whole.update(os.fsencode(f"{place}\0{len(content)}\0"))
        whole.update(content)
    return whole.hexdigest()[:16]


def used_plugins(names: Iterable[str], used: Iterable[Declaration]) -> dict[str, str]:
    """Return the digests of the plug-ins that a job uses, by name, as they were imported.

    If a file has changed since its import, the digest is the old one, because the run continues with that code.

    Args:
        names: the job's `plugins`, which all count.
        used: the declarations that the job names.

    Raises:
        InvalidConfig: a declaration is of a file that other processes would not import.
    """
    counted = {plugin.origin: plugin for plugin in map(_as_imported, names)}
    installed = {plugin.origin: plugin for plugin in installed_plugins()}
    for part in used:
        if part.origin == BUILT_IN or part.origin in counted:
            continue
        if part.origin not in installed:
            raise InvalidConfig(
                f"{part.name!r} is declared by {part.origin}, which the other processes of the job do not "
                f"import; set plugins to [{part.origin}]"
            )
        counted[part.origin] = installed[part.origin]
    digests: dict[str, str] = {}
    for plugin in counted.values():  # files of one name in two folders count both
        digests[plugin.name] = "+".join(filter(None, (digests.get(plugin.name), plugin.digest)))
    return digests


def _as_imported(name: str) -> Plugin:
    """Return a plug-in as it was imported, without reading its file again; import it if it was not."""
    path = Path(name).resolve()
    if name.endswith(".py") and str(path) in _imported:
        return Plugin(path.name, str(path), _imported[str(path)])
    return _load(name)
