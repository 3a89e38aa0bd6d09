"""The host memory of a rollout's pod, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned import H100, HYBRID, LLAMA_7B, MODELLED, ppo
from transformers import LlamaConfig

from rolemesh.checks.memory_limit import refuse_small_limit
from rolemesh.errors import InvalidConfig
from rolemesh.planner.cost import handover_seconds
from rolemesh.planner.device_specs import GIB
from rolemesh.planner.estimate import Cluster, Planner
from rolemesh.planner.host_memory import HostMemory, host_memory

POLICY = 6_738_415_616
SHAPES = dict.fromkeys(MODELLED, LLAMA_7B)


def test_a_pod_has_its_processes_and_one_published_version() -> None:
    """The version is in the dtype in which it is published."""
    roles = ("rollout",)
    vllm = {"name": "vllm", "dtype": "auto"}
    assert host_memory(ppo(rollout=vllm), SHAPES, roles) == HostMemory(7 * GIB, 2 * POLICY, 0)
    of_float32 = host_memory(ppo(rollout=vllm | {"dtype": "float32"}), SHAPES, roles)
    assert of_float32 == HostMemory(7 * GIB, 4 * POLICY, 0)
    split = ppo(rollout=vllm | {"tensor_model_parallel_size": 4})
    assert host_memory(split, SHAPES, roles) == HostMemory((7 + 3 * 3) * GIB, 2 * POLICY, 0)
    assert host_memory(ppo(), SHAPES, roles) == HostMemory(3 * GIB, 4 * POLICY, 0)  # hf has float32 weights
    assert host_memory(ppo(), SHAPES, ("actor",)) is None


def test_sleeping_engines_leave_weights_on_the_host() -> None:
    job = ppo(rollout={"name": "vllm"})
    plan = Planner(job, SHAPES, Cluster(H100, 8)).divided("hybrid", HYBRID, {"policy": 4, "value": 4})
    assert [group.host for group in plan.groups] == [HostMemory(28 * GIB, 2 * POLICY, 4 * 2 * POLICY), None]
    awake = ppo(rollout={"name": "vllm", "free_cache_engine": False})
    assert host_memory(awake, SHAPES, HYBRID["policy"]) == HostMemory(7 * GIB, 2 * POLICY, 0)


def test_a_limit_below_weights_is_refused_and_below_guess_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LlamaConfig(tie_word_embeddings=False).save_pretrained(tmp_path)  # its defaults are the 7B's
    model = {"model": {"path": str(tmp_path)}}
    job = ppo(actor=model, rollout={"name": "vllm", "dtype": "float32"})
    with pytest.raises(InvalidConfig) as refused:
        refuse_small_limit(job, 25 * GIB)
    parts = "takes about 32.1 GiB of host memory (processes 7.0 GiB, version 25.1 GiB)"
    assert f"{parts}, but the memory limit of this container is 25.0 GiB: raise it" in str(refused.value)
    refuse_small_limit(job, 32 * GIB)
    (warning,) = caplog.messages
    assert f"{parts}, but the memory limit of this container is 32.0 GiB: raise it" in warning
    refuse_small_limit(job, 33 * GIB)
    refuse_small_limit(ppo(actor=model, rollout={"name": "vllm"}), 32 * GIB)
    assert caplog.messages == [warning]


def test_a_handover_is_written_verified_and_copied_to_the_engine() -> None:
    """3, 34 and 13 GB/s, and 1 GB/s between services. It was measured at 2.71 s for 6.17 GB."""
    for job, width in ((ppo(), 4), (ppo(rollout={"name": "vllm"}), 2)):
        together = handover_seconds(job, SHAPES, H100, 1, together=True)
        assert together == pytest.approx(width * POLICY * (1 / 3e9 + 1 / 34e9 + 1 / 13e9))
        assert together * 6_171_394_048 / (width * POLICY) == pytest.approx(2.71, rel=0.01)
        apart = handover_seconds(job, SHAPES, H100, 1, together=False)
        assert apart - together == pytest.approx(width * POLICY / 1e9)
