"""Engines: what generates in the rollout role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rolemesh.catalog.catalog import Catalog, Code, Declaration


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Declaration):
    """An engine. Its code takes (job, worker) and returns rolemesh.services.rollout.engines.Engine.

    Args:
        keys: of the section `rollout` that only this engine, and others that name them, have.
        on_device: it computes on the rollout's device; false: other servers do.
        reserves_memory: it holds its weights in rollout.dtype, in which the actor then publishes them, and
            reserves rollout.gpu_memory_utilization of the device; false: float32 weights, and memory as rows
            need it. The planner counts with this.
        least_temperature: to which it raises a lower one that is not 0; such a temperature is refused.
        check: a function that raises InvalidConfig if the engine is not installed.
    """

    kind: ClassVar[str] = "engine"

    keys: tuple[str, ...] = ()
    on_device: bool = True
    reserves_memory: bool = False
    least_temperature: float = 0.0
    check: Code | None = None

    def arguments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return ("job", "worker"), ()


ENGINE_ROOM = "rolemesh.services.rollout.engines"
VLLMS_LEAST_TEMPERATURE = 0.01  # _MAX_TEMP in vllm/sampling_params.py

ENGINES = Catalog(
    EngineSpec,
    EngineSpec(name="hf", code=f"{ENGINE_ROOM}.hf:HfEngine", meaning="transformers, bit-exact, on any device"),
    EngineSpec(
        name="vllm",
        code=f"{ENGINE_ROOM}.vllm.engine:load_vllm",
        keys=(
            "stop",
            "gpu_memory_utilization",
            "enforce_eager",
            "tensor_model_parallel_size",
            "max_num_batched_tokens",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "disable_log_stats",
        ),
        reserves_memory=True,
        least_temperature=VLLMS_LEAST_TEMPERATURE,
        check=f"{ENGINE_ROOM}.vllm.engine_args:check_installed",
        meaning="vLLM in the rollout's process",
    ),
    EngineSpec(
        name="openai",
        code=f"{ENGINE_ROOM}.openai.engine:load_openai",
        keys=("openai",),
        on_device=False,
        least_temperature=VLLMS_LEAST_TEMPERATURE,  # of vLLM's servers
        meaning="vLLM or SGLang servers of yours (docs/openai-engine.md)",
    ),
)
