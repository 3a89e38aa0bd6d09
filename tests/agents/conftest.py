"""The model of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from echoing import PLUGIN, make_talkative

from rolemesh.catalog.plugin_imports import forget


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """The agents of these tests are nobody else's."""
    yield
    forget(str(PLUGIN))


@pytest.fixture(scope="session")
def talkative_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("talkative"))
