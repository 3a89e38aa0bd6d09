"""Maps each key of the job file to vLLM, and handles differences between versions of vLLM.

vLLM is imported only here and in engine.py, after `prepare_environment`, and only if a job chooses this engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from rolemesh.config import JobConfig
from rolemesh.config.rollout import SamplingConfig, own_rows
from rolemesh.errors import InvalidConfig
from rolemesh.models.directory import existing_directory
from rolemesh.models.loading import vocabulary_of
from rolemesh.services.rollout.engines.fitting import check_kept
from rolemesh.services.rollout.engines.vllm import owner
from rolemesh.workers.devices import resolve_device

# Keys of rollout.* that are passed to vLLM unchanged, with vLLM's names.
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
# Keys that need code below.
ENGINE_DERIVED = ("enforce_eager", "free_cache_engine")
# Keys of every request; see `sampling_arguments`.
SAMPLING = ("temperature", "top_k", "top_p", "do_sample", "ignore_eos", "stop")
# Why the engine does not read the other keys.
ELSEWHERE = {
    "name": "selects the engine",
    "mode": "read by the controller",
    "n": "the controller repeats the prompts",
    "seed": "the controller derives each row's seed from it",
    "val_kwargs": "the worker passes `generate` the sampling parameters that a request names",
    "prompt_length": "no effect: data.max_prompt_length is used",
    "response_length": "no effect: data.max_response_length is used",
    "calculate_log_probs": "no effect: always true",
    "load_format": "no effect: always safetensors",
    "multi_turn": "read by the controller and the environment",
    "agent": "read by the controller",
    "openai": "for another engine",
    "options": "for an engine of a plug-in",
}

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # send nothing over the network
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # models are local directories
    "VLLM_LOGGING_CONFIG_PATH": str(owner.LOGGING),
    # FlashInfer's sampler has neither seeds nor processed log-probabilities, so vLLM would only import it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # float32 is float32: vLLM's attention for it, written in Triton, would multiply in TF32.
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads of gRPC, which do not survive a fork
}
BIND = "VLLM_CPU_OMP_THREADS_BIND"
CPU_ENVIRONMENT = {
    BIND: "nobind",  # roles share the cores; OMP_NUM_THREADS limits each
    "TORCHDYNAMO_DISABLE": "1",  # compiling C++ at the first token would take half a minute and gain nothing
}
# With one rank, the engine's process computes by itself. By default vLLM starts another one for that, whose
# threads it can bind to cores. It costs 8 s of imports, its memory, and a queue that each token passes.
UNBOUND_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

# Its methods run in vLLM's worker processes, which import it by this name.
EXTENSION = "rolemesh.services.rollout.engines.vllm.extension.RolloutExtension"

HEAD_IN_FLOAT32 = {"head_dtype": "float32"}  # in the model's own configuration

# Set for the ranks of this process's group. vLLM's processes must not read them as their own.
OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

REMEDY = (
    "install `rolemesh[vllm]` for a GPU, requirements-vllm.lock for a CPU (`make vllm`), "
    "or set rollout.name to hf"
)


@contextmanager
def restored_environment() -> Iterator[None]:
    """Restore this process's environment variables on exit.

    vLLM's processes start in this context and inherit what `prepare_environment` and vLLM itself set, such as
    LD_PRELOAD and LOCAL_WORLD_SIZE. No process that starts later should inherit it.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


def environment_of(device: torch.device, given: Mapping[str, str], *, logs: bool = False) -> dict[str, str]:
    """Return the environment variables to set for vLLM, without those that are given.

    If the user binds threads to cores, vLLM computes in a process that it can bind.
    """
    settings = ENVIRONMENT | ({owner.LEVEL: "INFO"} if logs else {})
    if device.type == "cpu":
        settings |= CPU_ENVIRONMENT | ({} if BIND in given else UNBOUND_ENVIRONMENT)
    return {name: value for name, value in settings.items() if name not in given}


def prepare_environment(device: torch.device, *, logs: bool = False) -> None:
    """Set the environment variables that vLLM and its processes read at import. Existing settings are kept,
    except those of a group of ranks, which has been joined by now.

    Args:
        device: on which vLLM computes.
        logs: vLLM logs at INFO, unless VLLM_LOGGING_LEVEL is set; else at WARNING.

    Raises:
        InvalidConfig: vLLM is not installed.
    """
    os.environ.update(environment_of(device, os.environ, logs=logs))
    os.environ[owner.VARIABLE] = str(os.getpid())
    for name in [name for name in os.environ if name in OF_RANKS or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise InvalidConfig(f"rollout.name is vllm, and vLLM cannot be imported ({error}): {REMEDY}") from error


def check_installed() -> None:
    """Check that vLLM is installed, without importing it, which takes seconds.

    Raises:
        InvalidConfig: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise InvalidConfig(f"rollout.name is vllm, and vLLM is not installed: {REMEDY}")


def engine_arguments(job: JobConfig, model: Any) -> dict[str, Any]:
    """Make the AsyncEngineArgs of a job.

    Args:
        model: the causal LM on the device `meta`.

    Raises:
        InvalidConfig: the installed vLLM does not support trainer.device, the model there, or float32 logits,
            or rollout.top_k is above the vocabulary.
    """
    from vllm.platforms import current_platform

    rollout = job.rollout
    device = resolve_device(job.trainer.device).type
    check_kept(rollout, vocabulary_of(model))
    decided = with_rows_and_share(job)
    if device == "cpu":
        _check_head_size(model)
        _check_experts(model)
    if current_platform.device_type != device:
        raise InvalidConfig(
            f"the installed vLLM computes on {current_platform.device_type!r}, but the role on {device!r}: "
            "install the other vLLM or set trainer.device"
        )
    arguments = {theirs: getattr(decided.rollout, ours) for ours, theirs in ENGINE.items()}
    arguments |= {
        "model": str(existing_directory(job.actor.model, "rollout")),
        "trust_remote_code": job.actor.model.trust_remote_code,
        "max_model_len": job.data.max_prompt_length + job.data.max_response_length,
        "load_format": "safetensors",
        "skip_tokenizer_init": not rollout.stop,
        "generation_config": "vllm",  # each request names its end tokens
        "logprobs_mode": "processed_logprobs",  # of the distribution from which tokens are sampled
        "max_logprobs": max(1, rollout.num_kept),
        "worker_extension_cls": EXTENSION,
        "enforce_eager": rollout.enforce_eager or device == "cpu",
    }
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(decided, model)
        # After a chunk of a prompt vLLM rewinds the row's random stream. A CPU's generator cannot do that, and
        # the engine would end. So prompts are not chunked, and a forward pass must have room for the longest.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(rollout.max_num_batched_tokens, arguments["max_model_len"])
    elif rollout.free_cache_engine:
        arguments["enable_sleep_mode"] = True
    if job.actor.head_dtype == "float32" and rollout.dtype != "float32":
        _check_head_type()
        arguments["hf_overrides"] = HEAD_IN_FLOAT32
    return arguments


def with_rows_and_share(job: JobConfig) -> JobConfig:
    """Return the job with its engine's rows and share of the device decided for this process's device."""
    device = resolve_device(job.trainer.device)
    if device.type == "cpu" or not job.has_own_device:
        return job.with_rows_and_share()
    gpu = torch.cuda.get_device_properties(device)
    return job.with_rows_and_share(own_rows(gpu.total_memory, gpu.name))


def sampling_arguments(job: JobConfig, sampling: SamplingConfig, ends: list[int]) -> dict[str, Any]:
    """Make the SamplingParams of a call, except each row's seed and max_tokens.

    The tokens that top_k and top_p leave come as log-probabilities. vLLM 0.32 could return them alone
    (`return_sampling_mask`), but as Python lists, too, and it then refuses all greedy rows of the engine.
    """
    rollout = job.rollout
    drawn = {} if sampling.greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p}
    return {
        **drawn,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "logprobs": sampling.num_kept,  # of the sampled token, and of this many of the likeliest tokens
        "flat_logprobs": True,
        "ignore_eos": rollout.ignore_eos,
        "stop_token_ids": [] if rollout.ignore_eos else ends,
        "stop": list(rollout.stop),
        "detokenize": bool(rollout.stop),
        "skip_special_tokens": False,  # a text of rollout.stop may be a special token
    }


def _check_head_size(model: Any) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if _head_size(model) not in sizes:
        raise InvalidConfig(
            f"rollout: the model's attention heads are {_head_size(model)} wide; vLLM on a CPU supports {sizes}"
        )


def _check_experts(model: Any) -> None:
    """Refuse experts on a CPU: there vLLM reorders their weights only at its first load.

    After an update it would multiply by weights in the wrong order, without an error.
    """
    experts = next((name for name, _ in model.named_parameters() if ".experts." in name), "")
    if experts:
        raise InvalidConfig(
            f"rollout: the model is a mixture of experts ({experts}), whose updates vLLM on a CPU computes "
            "wrongly; set rollout.name to hf, or use a GPU"
        )


def _check_head_type() -> None:
    """Refuse versions of vLLM that read head_dtype only for pooling models: they lack this method."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    if not hasattr(LogitsProcessor, "_apply_head"):
        raise InvalidConfig(
            "actor.head_dtype is float32, but the installed vLLM rounds the logits of models that generate; "
            "install vLLM 0.32, or set actor.head_dtype to model"
        )


def _head_size(model: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _cpu_cache_bytes(job: JobConfig, model: Any) -> int:
    """Compute the size of the KV cache on a CPU.

    It has room for max_num_seqs rows of full length, but at most the share gpu_memory_utilization of the free
    RAM. vLLM's default is a share of all RAM, even if other processes use it.
    """
    config = model.config.get_text_config()
    heads = config.num_key_value_heads or config.num_attention_heads
    per_token = (
        2 * config.num_hidden_layers * heads * _head_size(model) * (4 if job.rollout.dtype == "float32" else 2)
    )
    block = 128
    length = -(-(job.data.max_prompt_length + job.data.max_response_length) // block) * block
    free: int = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # One additional row, and a block that vLLM keeps empty.
    wanted: int = ((job.rollout.rows + 1) * length + block) * per_token
    return min(wanted, int(job.rollout.share * free))


def names_versions() -> bool:
    """Return whether this vLLM reports the weights' version of each token (0.32 does).

    Otherwise an update of the weights waits for the running rows.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    return hasattr(AsyncLLM, "update_weight_version")
