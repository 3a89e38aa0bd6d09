"""Fixtures, such as tiny models made once per session; and the plug-ins that keep heavy tests apart.

Tests depend neither on what lies in the folder where pytest is started, nor on the user's settings of Hugging
Face's libraries.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

# Torch is imported in fixtures: the process that hands tests out does not need it, and the others wait for it.
if TYPE_CHECKING:
    from rolemesh.config import JobConfig

pytest_plugins = ["heavy_tests", "heavy_scheduling"]

# The user's settings of huggingface_hub, transformers and datasets. They are removed before these libraries are
# imported, which read them once. Processes that tests start do not get them either.
OF_HUGGING_FACE = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_")
for variable in [name for name in os.environ if name.startswith(OF_HUGGING_FACE)]:
    del os.environ[variable]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collecting garbage: nearly all objects stay, and looking at them takes seconds."""
    gc.disable()
    found = yield
    gc.enable()
    gc.freeze()  # and later collections need not look at them, either
    return found


@pytest.fixture(scope="session", params=["qwen2", "qwen3", "llama"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Hugging Face directory, for each architecture."""
    from rolemesh.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2-shaped Hugging Face directory of one layer: a layer more would be time in every run.

    With this seed its answers differ in length and reward, as tests of runs need.
    """
    from rolemesh.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2", num_layers=1, seed=2)


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of two layers, for tests of models."""
    from rolemesh.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("two"), "qwen2")


@pytest.fixture(scope="session")
def ending_model(any_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 33 tokens that end a response, for each architecture."""
    return with_more_ends(any_model, tmp_path_factory.mktemp("ending"))


@pytest.fixture(scope="session")
def tiny_ending_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of one architecture."""
    return with_more_ends(tiny_model, tmp_path_factory.mktemp("ending"))


def with_more_ends(model_directory: Path, into: Path) -> Path:
    """Copy a model, with 33 tokens that end a response. The tiny models almost never generate EOS."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory)
    own = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [*range(0, 256, 8), own]
    model.save_pretrained(into)
    for file in model_directory.glob("token*"):
        (into / file.name).write_bytes(file.read_bytes())
    return into


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable shared memory, as between two machines: every byte goes over the network."""
    monkeypatch.setattr("rolemesh.weights.region.CAN_SHARE", False)


@pytest.fixture
def soon_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold an environment that was killed to be gone after half a second, not after five."""
    monkeypatch.setattr("rolemesh.rpc.calling.episodes.GONE_AFTER_S", 0.5)


@pytest.fixture
def step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engine hf hand over rows right after the step that ended them."""
    monkeypatch.setattr("rolemesh.services.rollout.engines.hf.batch.STEPS_S", 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Any:
    """Escape lone surrogates in a test's log, because they cannot be sent to the process that prints it."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True, scope="session")
def _empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run tests in an empty folder. The checkout may have what a user made, such as outputs/ of the demo."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Use one thread: test processes share the cores, and spinning threads would slow down all."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_curves() -> Iterator[None]:
    """Runs in a test process draw no curves.png, which takes half a second. Runs in other processes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rolemesh.services.controller.main.draw_curves", lambda *_: None)
        yield


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A test that sets up logging, as a command does, changes it for no other test."""
    level, handlers = logging.root.level, [*logging.root.handlers]
    yield
    logging.root.setLevel(level)
    for handler in {*logging.root.handlers}.difference(handlers):
        if type(handler) is logging.StreamHandler:  # not pytest's own
            logging.root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _plugins_as_before() -> Iterator[None]:
    """Plug-ins that a test loads are nobody else's: their names, and what a job with them may say."""
    from rolemesh.catalog.catalog import BUILT_IN
    from rolemesh.catalog.plugin_imports import NAMED, forget

    def origins() -> set[str]:
        return {part.origin for catalog in NAMED.values() for part in catalog.values()} - {BUILT_IN}

    before = origins()
    yield
    for origin in origins() - before:
        forget(origin)


@pytest.fixture
def differing_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's controller compares no fingerprints: a replica has another job on purpose, e.g. to die."""
    from rolemesh.fingerprint import Fingerprint, fingerprint
    from rolemesh.services.controller import main, role_clients

    def of_version_alone(job: JobConfig, role: str) -> Fingerprint:
        return replace(fingerprint(job, role), digests={})

    for module in (main, role_clients):
        monkeypatch.setattr(module, "fingerprint", of_version_alone)
