"""Fixtures: tiny models, made once a session. And which of two test processes runs what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rolemesh.models.tiny import make_tiny_model
from rolemesh.weights import region


@pytest.fixture(scope="session", params=["qwen2", "qwen3", "llama"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of each architecture in turn."""
    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-shaped Hugging Face directory."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2")


@pytest.fixture
def ending_model(any_model: Path, tmp_path: Path) -> Path:
    """The tiny models hardly ever say EOS; this one has 33 tokens that end a response."""
    model = AutoModelForCausalLM.from_pretrained(any_model)
    own = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [*range(0, 256, 8), own]
    model.save_pretrained(tmp_path)
    for file in any_model.glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system that has none, and as between two machines: every byte goes over the network."""
    monkeypatch.setattr(region, "CAN_SHARE", False)


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the hf engine rows are handed over after the step that ended them."""
    monkeypatch.setattr("rolemesh.services.rollout.engines.hf.STEPS_S", 0.0)


# Files whose tests share what takes a minute to make.
TOGETHER = {
    "test_vllm_engine.py": "vllm",
    "test_openai_engine.py": "vllm",
    "test_vllm_run.py": "vllm",
    "test_learning.py": "learning",
    "test_hostile_messages.py": "hostile",
}


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A test process that has nothing to do takes the next test; but all tests that start vLLM, which takes the
    better part of a minute, are one process's: each file starts its own once. So are those that learn from one
    warm-started model. Both come first."""
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(Path(nodeid.partition("::")[0]).name, nodeid)

    return Together(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    """What a test logged goes to the process that prints it, which takes no half of a surrogate pair."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two test processes share two cores; spinning threads would ruin both."""
    torch.set_num_threads(1)
