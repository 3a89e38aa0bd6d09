"""Import Python files of users: plug-ins and reward functions."""

from __future__ import annotations

from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType


class _Compiling(SourceFileLoader):
    """Compiles the source, and neither reads nor writes a compiled file.

    Python compares a compiled file with the second and the size of its source. It would miss an edit that comes
    within a second and keeps the size.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def spec_of_file(module_name: str, path: Path) -> ModuleSpec | None:
    """Return how to import a file as it is now; None if Python cannot import a file of this name."""
    loader = _Compiling(module_name, str(path)) if path.suffix == ".py" else None
    return spec_from_file_location(module_name, path, loader=loader)
