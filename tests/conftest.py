"""Fixtures: tiny models, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rolemesh.models.tiny import make_tiny_model


@pytest.fixture(scope="session", params=["qwen2", "qwen3", "llama"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of each architecture in turn."""
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-shaped Hugging Face directory."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two test processes share two cores; spinning threads would ruin both."""
    torch.set_num_threads(1)
