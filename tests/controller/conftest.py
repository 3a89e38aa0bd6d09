"""What tests of the controller share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logs_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command in this process sets up its own logs."""
    monkeypatch.setattr(logging.root, "handlers", [])
    levels = {logger: logger.level for logger in (logging.root, logging.getLogger("httpx"))}
    yield
    for logger, level in levels.items():
        logger.setLevel(level)
