"""The plug-ins of these tests, forgotten after each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import PLUGIN
from tool_plugins import TOOLS

from rolemesh.catalog.plugin_imports import forget


@pytest.fixture(autouse=True)
def without_the_plugin() -> Iterator[None]:
    yield
    forget(str(PLUGIN))


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with TOOLS, which is also a plug-in."""
    (tmp_path / "ledger_parts.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield str(tmp_path / "ledger_parts.py")
    forget(str(tmp_path / "ledger_parts.py"))
    sys.modules.pop("ledger_parts", None)
