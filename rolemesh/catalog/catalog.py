"""The table behind each kind of thing that a job can name."""

from __future__ import annotations

import difflib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from rolemesh.errors import InvalidConfig, RoleFailed, RolemeshError
from rolemesh.importing import imported

log = logging.getLogger(__name__)

BUILT_IN = "rolemesh"

Code = str | Callable[..., Any]
"""A function or class, or its import path, as "package.module:name"."""


def load(code: Code) -> Any:
    """Return the function or class; import its module if `code` is a path."""
    if not isinstance(code, str):
        return code
    module, _, name = code.partition(":")
    return getattr(imported(module), name)


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Fields that every kind of part declares.

    Args:
        name: as the job file says it.
        code: what runs.
        options: the schema of the keys that only this one has; None: it has none. `code` gets their values as
            keyword arguments. The job file has them in the `options` key beside the name.
        origin: where it comes from: BUILT_IN, or the plug-in's file or module.
        meaning: one line for people.
    """

    kind: ClassVar[str] = "part"  # for messages

    name: str
    code: Code
    options: type[BaseModel] | None = None
    origin: str = BUILT_IN
    meaning: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.origin}"

    def load(self) -> Any:
        """Return the code."""
        return load(self.code)

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the positional arguments of `code`, and its keyword arguments other than options."""
        raise NotImplementedError

    @contextmanager
    def errors_named(self) -> Iterator[None]:
        """Name the plug-in's part whose code raises within the `with` block, and log the traceback.

        Raises:
            RoleFailed: the code raised. A RolemeshError stays as it is, and so do the errors of Rolemesh's own
                parts.
        """
        try:
            yield
        except Exception as error:
            if self.origin == BUILT_IN or isinstance(error, RolemeshError):
                raise
            said = f"{self} raised {type(error).__name__}: {error}{self._where(error)}"
            log.exception("%s", said)
            raise RoleFailed(said) from error

    def _where(self, error: Exception) -> str:
        """Return the last line of the part's file that ran. What it called may have raised."""
        file = getattr(sys.modules.get(self.load().__module__), "__file__", None)
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


D = TypeVar("D", bound=Declaration)


class Catalog(Mapping[str, D], Generic[D]):
    """Declarations of one kind, by name, in the order in which they were added.

    Args:
        spec: the class of its declarations.
        built_in: the declarations of Rolemesh itself.
    """

    def __init__(self, spec: type[D], *built_in: D) -> None:
        self.spec = spec
        self._declared: dict[str, D] = {}
        for declaration in built_in:
            self.add(declaration)

    def __getitem__(self, name: str) -> D:
        return self._declared[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)

    def add(self, declaration: D) -> None:
        """Add a declaration. One of the same origin takes the place of its predecessor.

        Raises:
            InvalidConfig: another origin has declared the name.
        """
        known = self._declared.get(declaration.name)
        if known is not None and (known.origin != declaration.origin or known.origin == BUILT_IN):
            raise InvalidConfig(
                f"{declaration.origin} declares the {declaration.kind} {declaration.name!r}, which "
                f"{known.origin} has declared already; choose another name"
            )
        self._declared[declaration.name] = declaration

    def remove(self, origin: str) -> None:
        """Forget what an origin has declared."""
        self._declared = {name: each for name, each in self._declared.items() if each.origin != origin}

    @contextmanager
    def adding(self, declaration: D) -> Iterator[D]:
        """Add a declaration for the duration of a `with` block."""
        before = self._declared
        self._declared = dict(before)
        self.add(declaration)
        try:
            yield declaration
        finally:
            self._declared = before

    def unknown(self, name: str) -> str:
        """Say which names are known, where each comes from, and which is the nearest."""
        origins: dict[str, list[str]] = {}
        for known in self._declared.values():
            origins.setdefault(known.origin, []).append(known.name)
        said = "; ".join(
            ", ".join(names) if origin == BUILT_IN else f"of {origin}: {', '.join(names)}"
            for origin, names in origins.items()
        )
        near = difflib.get_close_matches(name, self._declared, n=1, cutoff=0.6)
        return f"which is none of {said}" + "".join(f"; did you mean {match!r}?" for match in near)
