"""A Hub on loopback with an empty cache, for this process and for those that it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, serving_hub
from huggingface_hub import constants


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """huggingface_hub reads its variables when it is imported, so this process has to be told again."""
    with serving_hub() as served:
        home = tmp_path / "hub-home"
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        monkeypatch.setenv("HF_HOME", str(home))
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "600")  # a server that holds its answer is not gone
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # vLLM's engine sets it
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": served.endpoint,
            "HF_HUB_OFFLINE": False,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_DOWNLOAD_TIMEOUT": 600,
            "HF_HUB_ETAG_TIMEOUT": 600,
            "HF_TOKEN_PATH": str(home / "token"),
        }.items():
            assert hasattr(constants, name)
            monkeypatch.setattr(constants, name, value)
        yield served
