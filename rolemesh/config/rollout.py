"""rollout: generation."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rolemesh.config.base import Config
from rolemesh.config.effects import NoEffect
from rolemesh.config.model import Precision

# Keys of other systems' job files that ask for what a rollout here does not do.
NOT_HERE = {
    "multi_turn": "a response is one turn: nothing speaks in between",
    "agent": "a response is one turn: there are no agent loops",
}
# What only an engine with a scheduler and a cache of its own can do; the default elsewhere.
VLLM_ONLY = (
    *("stop", "gpu_memory_utilization", "enforce_eager", "tensor_model_parallel_size"),
    *("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats"),
)

# A batch is judged in about this many calls: enough that judging overlaps with generation, few enough that
# every call fills the accelerator. Both the controller and the planner count with it.
CHUNKS_PER_BATCH = 4

# Of a truncated distribution the trainer is sent every token that could be drawn, [B, T, top_k].
MAX_KEPT = 512


class SamplingConfig(Config):
    """How tokens are drawn. top_k is applied before top_p, both on logits / temperature."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy")
    top_k: int = Field(-1, ge=-1, description="draw from the k likeliest tokens; -1: from all")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the smallest set with this mass")
    do_sample: bool = Field(True, description="false: greedy")
    n: int = Field(1, gt=0, description="responses per prompt")

    @model_validator(mode="after")
    def _top_k_is_not_zero(self) -> "SamplingConfig":
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves no token; -1 takes all")
        return self

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Some tokens cannot be drawn."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def num_kept(self) -> int:
        """K of the column kept_ids; 0: no such column. Only what is trained on has it."""
        return 0


class ValSamplingConfig(SamplingConfig):
    do_sample: bool = Field(False, description="false: greedy")


class OpenAIConfig(Config):
    """Servers that the engine openai works with; docs/openai-engine.md says how to start one."""

    urls: tuple[str, ...] = Field((), description="of the servers, as [http://10.0.0.7:8000]; all of one model")
    api: Literal["vllm", "sglang"] = Field("vllm", description="whose servers they are")
    weights_dir: str = Field("", description="a directory shared with the servers, at the same path there")
    api_key_env: str = Field("", description="the environment variable with the servers' API key; none: no key")
    timeout_s: float = Field(600.0, gt=0, description="a row, or a load of weights, that takes longer is lost")


class RolloutConfig(SamplingConfig):
    name: Literal["hf", "vllm", "openai"] = Field("hf", description="the engine")
    mode: Literal["sync", "async"] = Field(
        "sync", description="async: rollouts run ahead of training by trainer.max_staleness steps"
    )
    ignore_eos: bool = Field(False, description="always use the whole response length")
    stop: tuple[str, ...] = Field((), description="texts that end a response too; their tokens are part of it")
    prompt_length: Annotated[int | None, NoEffect("data.max_prompt_length holds everywhere")] = Field(
        None, gt=0, description="no effect; must equal data.max_prompt_length"
    )
    response_length: Annotated[int | None, NoEffect("data.max_response_length holds everywhere")] = Field(
        None, gt=0, description="no effect; must equal data.max_response_length"
    )
    calculate_log_probs: Annotated[bool, NoEffect("a token always comes with its log-probability")] = Field(
        True, description="no effect; false is refused"
    )
    dtype: Precision = Field("float32", description="what the engine computes in")
    max_num_seqs: int = Field(256, ge=4, description="rows decoded at once")
    seed: int = Field(42, description="of the rows' random streams")
    tensor_model_parallel_size: int = Field(
        1, gt=0, description="GPUs over which one replica's layers are split"
    )
    gpu_memory_utilization: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of a GPU's memory for weights and KV cache; of the free RAM on a CPU",
    )
    free_cache_engine: bool = Field(True, description="sleeping gives the memory back; false: it only pauses")
    max_num_batched_tokens: int = Field(8192, gt=0, description="tokens of one forward, prompts' and new ones")
    enable_chunked_prefill: bool = Field(
        True, description="long prompts are read in pieces, beside decoding rows; not on a CPU"
    )
    enable_prefix_caching: bool = Field(True, description="rows with the same beginning share its KV cache")
    enforce_eager: bool = Field(False, description="neither CUDA graphs nor compilation; on a CPU always so")
    load_format: Annotated[Literal["auto", "safetensors"], NoEffect("weights are read from safetensors")] = (
        Field("auto", description="no effect: safetensors always, pickles never")
    )
    disable_log_stats: bool = Field(True, description="false: vLLM logs its throughput and cache use")
    val_kwargs: ValSamplingConfig = ValSamplingConfig()
    openai: OpenAIConfig = OpenAIConfig()

    @model_validator(mode="before")
    @classmethod
    def _one_turn(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for key, reason in NOT_HERE.items():
            if key in data and data[key] not in (None, {}, {"enable": False}):
                raise ValueError(f"rollout.{key} is set, and {reason}")
        return {key: value for key, value in data.items() if key not in NOT_HERE}

    @model_validator(mode="after")
    def _tokens_have_log_probs(self) -> "RolloutConfig":
        if not self.calculate_log_probs:
            raise ValueError(
                "calculate_log_probs is false; the correction and the metrics use them, so they stay"
            )
        return self

    @model_validator(mode="after")
    def _engine_has_the_key(self) -> "RolloutConfig":
        fields = type(self).model_fields
        foreign = [key for key in VLLM_ONLY if getattr(self, key) != fields[key].default]
        if self.name != "vllm" and foreign:
            raise ValueError(f"rollout.{foreign[0]} is the engine vllm's, and rollout.name is {self.name}")
        return self

    @model_validator(mode="after")
    def _other_servers_are_named(self) -> "RolloutConfig":
        if self.name == "openai" and not (self.openai.urls and self.openai.weights_dir):
            raise ValueError(
                "rollout.name is openai: set rollout.openai.urls to the servers, as in [http://10.0.0.7:8000], "
                "and rollout.openai.weights_dir to a directory that they see too"
            )
        return self

    @model_validator(mode="after")
    def _kept_tokens_are_bounded(self) -> "RolloutConfig":
        if self.truncates and not 0 < self.top_k <= MAX_KEPT:
            raise ValueError(
                f"top_p {self.top_p:g} with top_k {self.top_k}: the trainer is sent the tokens that could be "
                f"drawn, at most {MAX_KEPT} of them; set rollout.top_k between 1 and {MAX_KEPT}"
            )
        return self

    @property
    def num_kept(self) -> int:
        return self.top_k if self.truncates else 0

    @property
    def sampling(self) -> dict[str, SamplingConfig]:
        """How tokens are drawn, and how many responses to a prompt, by a request's meta_info["sampling"]."""
        return {"train": self, "validation": self.val_kwargs, "greedy": SamplingConfig(do_sample=False)}
