"""What becomes of each key of the job file, and what differs between versions of vLLM.

vLLM is imported here and in engine.py, after `prepare_environment`, and nowhere before the engine is chosen.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from transformers import GenerationConfig

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig
from rolemesh.errors import InvalidConfig
from rolemesh.models.loading import load_tokenizer, resolve_device
from rolemesh.services.rollout.engines.vllm import owner

# rollout.* that vLLM takes as they are, under its own names.
ENGINE = {
    "dtype": "dtype",
    "max_num_seqs": "max_num_seqs",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "enable_prefix_caching": "enable_prefix_caching",
    "disable_log_stats": "disable_log_stats",
}
# Those that take a word of code below.
ENGINE_DERIVED = ("enforce_eager", "free_cache_engine")
# Of every request, see `sampling_arguments`.
SAMPLING = ("temperature", "top_k", "top_p", "do_sample", "ignore_eos", "stop")
# Whose matter the others are.
ELSEWHERE = {
    "name": "picks the engine",
    "mode": "the controller's",
    "n": "the controller repeats the prompts",
    "seed": "the controller derives each row's from it",
    "val_kwargs": "the worker hands `generate` the sampling parameters that a request names",
    "prompt_length": "no effect: data.max_prompt_length holds",
    "response_length": "no effect: data.max_response_length holds",
    "calculate_log_probs": "no effect: always true",
    "load_format": "no effect: always safetensors",
    "openai": "another engine's",
}

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # nothing leaves for the network
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # models are directories
    "VLLM_LOGGING_CONFIG_PATH": str(owner.LOGGING),
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, and gRPC's do not survive a fork
}
CPU_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # roles share the cores: OMP_NUM_THREADS says how many are whose
    "TORCHDYNAMO_DISABLE": "1",  # it would compile C++ at the first token, for half a minute, to no gain
}

REMEDY = (
    "install `rolemesh[vllm]` for a GPU, requirements-vllm.lock for a CPU (`make vllm`), "
    "or set rollout.name to hf"
)


def prepare_environment(device: torch.device) -> None:
    """What vLLM and its processes read when they are imported. The user's own settings stay.

    Raises:
        InvalidConfig: vLLM is not installed.
    """
    for name, value in {**ENVIRONMENT, **(CPU_ENVIRONMENT if device.type == "cpu" else {})}.items():
        os.environ.setdefault(name, value)
    os.environ[owner.VARIABLE] = str(os.getpid())
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(f"rollout.name is vllm, and vLLM cannot be imported ({error}): {REMEDY}") from error


def check_installed() -> None:
    """Without importing it, which takes seconds.

    Raises:
        InvalidConfig: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise InvalidConfig(f"rollout.name is vllm, and vLLM is not installed: {REMEDY}")


def engine_arguments(job: JobConfig, model: Any) -> dict[str, Any]:
    """AsyncEngineArgs of a job.

    Args:
        model: the causal LM on the device `meta`.

    Raises:
        InvalidConfig: the installed vLLM is not for trainer.device.
    """
    from vllm.platforms import current_platform

    rollout, device = job.rollout, resolve_device(job.trainer.device).type
    if device == "cpu":
        _check_head_size(model)
    if current_platform.device_type != device:
        raise InvalidConfig(
            f"the installed vLLM computes on {current_platform.device_type!r}, and the role on {device!r}: "
            "install the other vLLM or set trainer.device"
        )
    arguments = {theirs: getattr(rollout, ours) for ours, theirs in ENGINE.items()}
    arguments |= {
        "model": job.actor.model.path,
        "trust_remote_code": job.actor.model.trust_remote_code,
        "max_model_len": job.data.max_prompt_length + job.data.max_response_length,
        "load_format": "safetensors",
        "skip_tokenizer_init": not rollout.stop,
        "generation_config": "vllm",  # what ends a response is said in each request
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are drawn from
        "max_logprobs": max(1, rollout.num_kept),
        "worker_extension_cls": "rolemesh.services.rollout.engines.vllm.extension.RolloutExtension",
        "enforce_eager": rollout.enforce_eager or device == "cpu",
    }
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(job, model)
        # After a piece of a prompt vLLM winds the row's random stream back, which a CPU's generator cannot do:
        # the engine would end. So prompts are read whole, and a forward must hold the longest.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(rollout.max_num_batched_tokens, arguments["max_model_len"])
    elif rollout.free_cache_engine:
        arguments["enable_sleep_mode"] = True
    return arguments


def sampling_arguments(job: JobConfig, sampling: SamplingConfig, ends: list[int]) -> dict[str, Any]:
    """SamplingParams of a call, all but the row's seed."""
    rollout = job.rollout
    drawn = {} if sampling.greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p}
    return {
        **drawn,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "max_tokens": job.data.max_response_length,
        "logprobs": sampling.num_kept,  # the drawn token's, and so many of the likeliest
        "flat_logprobs": True,
        "ignore_eos": rollout.ignore_eos,
        "stop_token_ids": [] if rollout.ignore_eos else ends,
        "stop": list(rollout.stop),
        "detokenize": bool(rollout.stop),
    }


def end_tokens(job: JobConfig, model: Any) -> tuple[list[int], int]:
    """The tokens that end a response, and the one that stands to the right of it.

    Raises:
        InvalidConfig: the model directory names no EOS token.
    """
    tokenizer = load_tokenizer(job.actor.model, "rollout")
    try:
        named = GenerationConfig.from_pretrained(job.actor.model.path, local_files_only=True).eos_token_id
    except OSError:  # no generation_config.json
        named = model.config.get_text_config().eos_token_id
    ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}
    if not ends:
        raise InvalidConfig(f"rollout: {job.actor.model.path} names no EOS token")
    pad: int = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return sorted(ends), pad


def _check_head_size(model: Any) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if _head_size(model) not in sizes:
        raise InvalidConfig(
            f"rollout: the model's attention heads are {_head_size(model)} wide; vLLM on a CPU takes {sizes}"
        )


def _head_size(model: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _cpu_cache_bytes(job: JobConfig, model: Any) -> int:
    """KV cache on a CPU: for max_num_seqs rows of full length, as far as the share of the free RAM holds them.
    vLLM's own default is a share of all RAM, whoever has it."""
    config = model.config.get_text_config()
    heads = config.num_key_value_heads or config.num_attention_heads
    per_token = (
        2 * config.num_hidden_layers * heads * _head_size(model) * (4 if job.rollout.dtype == "float32" else 2)
    )
    block = 128
    length = -(-(job.data.max_prompt_length + job.data.max_response_length) // block) * block
    free: int = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # One row more, and a block that vLLM keeps empty.
    wanted: int = ((job.rollout.max_num_seqs + 1) * length + block) * per_token
    return min(wanted, int(job.rollout.gpu_memory_utilization * free))


def names_versions() -> bool:
    """Whether this vLLM says of each token which weights made it (0.32 does). Where it does not, a new version
    waits for the running rows."""
    from vllm.v1.engine.async_llm import AsyncLLM

    return hasattr(AsyncLLM, "update_weight_version")
