"""The section rollout: generation."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rolemesh.catalog.agents import AGENTS
from rolemesh.catalog.call_formats import CALL_FORMATS
from rolemesh.catalog.engines import ENGINES, EngineSpec
from rolemesh.catalog.tools import TOOLS
from rolemesh.config.base import Config, LocalPath, NoEffect, name_in, options_of
from rolemesh.config.key_facts import DERIVED, FREE, REFUSED, UNCOMPARED, WARNED, Key, KeyFacts, Section
from rolemesh.config.model import Precision

# Log-probs, values and scores of a batch are computed in about this many calls: enough to overlap them with
# generation, and few enough that every call fills the accelerator. Controller and planner both use it.
CHUNKS_PER_BATCH = 4

# Rows of an engine, and the part of the device's memory that it reserves, if the job file does not say. vLLM
# takes OWN_SHARE and own_rows of a GPU that it has alone.
ROWS = 256
SHARE = 0.5
MOST_OWN_ROWS = 1024
OWN_SHARE = 0.9
EARLIER_DEFAULTS = {"gpu_memory_utilization": SHARE}  # in job files that were resolved before it could be null

# If sampling truncates, the trainer gets every token that could be sampled, [B, T, top_k].
MAX_KEPT = 512


def own_rows(memory_bytes: int, name: str = "") -> int:
    """Return how many rows vLLM decodes at once on a GPU by its own default (EngineArgs.get_batch_defaults).

    Args:
        memory_bytes: of the GPU.
        name: of the GPU, as CUDA has it.
    """
    return MOST_OWN_ROWS if memory_bytes >= 70 * 2**30 and "a100" not in name.lower() else ROWS


class SamplingConfig(Config):
    """Sampling of tokens. top_k is applied before top_p, both on logits / temperature."""

    temperature: float = Key(
        1.0, WARNED, read_by=("rollout",), ge=0, description="sampling temperature; 0: greedy"
    )
    top_k: int = Key(
        -1, WARNED, read_by=("rollout",), ge=-1, description="sample from the k likeliest tokens; -1: from all"
    )
    top_p: float = Key(
        1.0,
        WARNED,
        read_by=("rollout",),
        gt=0,
        le=1,
        description="sample from the smallest set of tokens with this probability; 1: from all",
    )
    do_sample: bool = Key(True, WARNED, read_by=("rollout",), description="sample tokens; false: greedy")
    n: int = Key(1, WARNED, read_by=("reward",), gt=0, description="responses per prompt")

    @model_validator(mode="after")
    def _top_k_is_not_zero(self) -> "SamplingConfig":
        if self.top_k == 0:
            raise ValueError("top_k is 0, which leaves no token; set it to -1 for all tokens")
        return self

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0

    @property
    def truncates(self) -> bool:
        """True if some tokens cannot be sampled."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def num_kept(self) -> int:
        """K of the column kept_ids, which only training rows have; 0: no such column."""
        return 0


class ValSamplingConfig(SamplingConfig):
    do_sample: bool = Key(False, WARNED, read_by=("rollout",), description="sample tokens; false: greedy")

    @model_validator(mode="after")
    def _says_how_it_samples_if_it_does(self) -> "ValSamplingConfig":
        if self.do_sample:
            return self
        fields = type(self).model_fields
        given = [key for key in ("temperature", "top_k", "top_p") if getattr(self, key) != fields[key].default]
        if self.temperature == 0:
            given.remove("temperature")  # greedy, which it says, too
        keys = self.model_fields_set
        if self.temperature and "temperature" in keys and "do_sample" not in keys:
            given = ["temperature"]
        if given:
            raise ValueError(
                f"{given[0]} is {getattr(self, given[0]):g}, but do_sample is false, the default of "
                f"validation, so answers are greedy; set do_sample to true, or leave {given[0]} out"
            )
        return self


class OpenAIConfig(Config):
    """Servers for the engine openai; docs/openai-engine.md describes how to start one."""

    urls: tuple[str, ...] = Key(
        (), FREE, description="URLs of the servers, e.g. [http://10.0.0.7:8000]; all must serve the same model"
    )
    api: Literal["vllm", "sglang"] = Key("vllm", FREE, description="the kind of server")
    weights_dir: LocalPath = Key(
        "", FREE, description="a directory shared with the servers, at the same path on them"
    )
    api_key_env: str = Key(
        "", FREE, description="name of the environment variable with the servers' API key; empty: no key"
    )
    timeout_s: float = Key(
        600.0,
        FREE,
        gt=0,
        description="deadline of a row or a load of weights, in seconds, after which it fails",
    )
    trust_env: bool = Key(
        False,
        FREE,
        description="reach the servers through the proxy that the environment names (HTTP_PROXY, HTTPS_PROXY, "
        "ALL_PROXY, NO_PROXY); false: directly",
    )


class McpServerConfig(Config):
    """A server that speaks the Model Context Protocol: a program that the role starts, or a URL."""

    command: tuple[str, ...] = Field(
        (), description="program and arguments; it is spoken to by stdin and stdout"
    )
    env: tuple[str, ...] = Field(
        (), description="names of environment variables that the program gets beside PATH, HOME and the like"
    )
    url: str = Field("", description="of a server that runs already; it is spoken to by streamable HTTP")
    headers: dict[str, str] = Field(
        {}, description="headers for the url, each with the name of the environment variable that has its value"
    )

    @model_validator(mode="after")
    def _is_one_of_two(self) -> "McpServerConfig":
        if bool(self.command) == bool(self.url):
            raise ValueError("a server has either command or url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r:.200}; a URL with http:// or https:// expected")
        if (self.env and self.url) or (self.headers and self.command):
            raise ValueError("env is for a command, and headers are for a url")
        return self


class MultiTurnConfig(Config):
    enable: bool = Key(
        False,
        REFUSED,
        read_by=("reward",),
        description="rows may be conversations of many turns, with a role environment",
    )
    max_assistant_turns: int | None = Key(
        None, WARNED, gt=0, description="most turns of the policy in a conversation; null: as many as fit"
    )
    max_user_turns: int | None = Key(
        None, WARNED, gt=0, description="most times that the environment answers; null: as many as fit"
    )
    max_parallel_calls: int = Key(
        1,
        WARNED,
        read_by=("environment",),
        gt=0,
        description="most calls of tools in a turn; further ones are refused",
    )
    max_tool_response_length: int = Key(
        256, WARNED, read_by=("environment",), gt=0, description="most characters of a tool's answer"
    )
    tool_response_truncate_side: Literal["left", "middle", "right"] = Key(
        "middle",
        WARNED,
        read_by=("environment",),
        description="which part of a longer answer of a tool is kept: left, right, or some from each side",
    )
    format: Annotated[str, name_in(CALL_FORMATS)] = Key(
        "hermes", WARNED, description="how the policy writes calls of tools"
    )
    template_rewrites: Literal["refuse", "keep", "split"] = Key(
        "refuse",
        WARNED,
        description="a chat template that changes earlier turns: refuse it; keep the ids as sampled; or split "
        "the row there, and show the policy what the template makes of the whole conversation",
    )
    tool_config_path: LocalPath | None = Key(
        None, WARNED, read_by=("environment",), content=True, description="verl's YAML file of tools"
    )
    interaction_config_path: LocalPath | None = Key(
        None, WARNED, read_by=("environment",), content=True, description="verl's YAML file of interactions"
    )
    tools: tuple[Annotated[str, name_in(TOOLS)], ...] = Key(
        (), WARNED, read_by=("environment",), description="tools by name: built in, or of a plug-in"
    )
    mcp_servers: dict[str, McpServerConfig] = Key(
        {},
        WARNED,
        read_by=("environment",),
        description="servers of the Model Context Protocol by name; tool_agent offers all their tools",
    )
    call_timeout_s: float = Key(
        60.0, FREE, read_by=("environment",), gt=0, description="seconds for one turn of an environment"
    )
    episode_timeout_s: float = Key(
        600.0,
        FREE,
        read_by=("environment",),
        gt=0,
        description="seconds for a conversation, generation included",
    )
    on_tool_error: Literal["tell", "fail"] = Key(
        "tell",
        WARNED,
        read_by=("environment",),
        description="a tool that raises or hangs: tell the policy, or fail the run with the row's name",
    )
    max_attempts: int = Key(
        3, FREE, gt=0, description="how often a conversation may begin anew because its environment was lost"
    )
    max_episodes: int = Key(
        4096,
        FREE,
        read_by=("environment",),
        gt=0,
        description="most open conversations of a replica of environment",
    )
    turn_reward_weight: float = Key(1.0, WARNED, description="weight of the environment's rewards of turns")
    episode_reward_weight: float = Key(
        1.0, WARNED, description="weight of the environment's rewards of conversations"
    )


class ExternalConfig(Config):
    """The agent external; docs/agents.md describes its program."""

    command: tuple[str, ...] = Key(
        (),
        WARNED,
        description="the program of an episode and its arguments, e.g. [node, agent.mjs]; no shell reads it",
    )
    pass_env: tuple[str, ...] = Key(
        (),
        FREE,
        description="environment variables that the program gets in addition to PATH, HOME, LANG and TMPDIR",
    )
    reward_at_limit: float | None = Key(
        None,
        WARNED,
        description="reward of an episode whose program fails because its conversation reached a limit; null: "
        "the run fails, with the row's name",
    )


class AgentConfig(Config):
    default_agent_loop: Annotated[str, name_in(AGENTS)] = Key(
        "single_turn_agent",
        DERIVED,
        read_by=("environment",),
        description="the agent of rows without agent_name",
    )
    num_workers: Annotated[int, NoEffect("one controller drives all conversations")] = Key(
        8, FREE, gt=0, description="no effect: verl's processes that drive conversations"
    )
    external: ExternalConfig = Section(ExternalConfig(), read_by=("environment",))


class RolloutConfig(SamplingConfig):
    FACTS: ClassVar[dict[str, KeyFacts]] = {  # of the training's samples, where the base's are a validation's
        **dict.fromkeys(
            ("temperature", "top_k", "top_p"),
            KeyFacts(REFUSED, read_by=("actor", "rollout", "reference"), counts_if="rollout.do_sample"),
        ),
        "do_sample": KeyFacts(REFUSED, read_by=("actor", "rollout", "reference")),
        "n": KeyFacts(REFUSED, read_by=("actor", "critic")),
    }

    name: Annotated[str, name_in(ENGINES)] = Key(
        "hf", WARNED, read_by=("actor", "rollout"), description="the engine that generates"
    )
    options: Annotated[dict[str, Any], options_of(ENGINES, "name")] = Key(
        {}, REFUSED, read_by=("rollout",), description="options of a plug-in's engine"
    )
    mode: Literal["sync", "async"] = Key(
        "sync",
        WARNED,
        description="sync: generate rows when their step needs them; async: up to trainer.max_staleness steps "
        "ahead",
    )
    ignore_eos: bool = Key(
        False,
        REFUSED,
        read_by=("rollout",),
        description="generate data.max_response_length tokens in every response",
    )
    stop: tuple[str, ...] = Key(
        (),
        REFUSED,
        read_by=("rollout",),
        description="texts that also end a response; their tokens are part of the response",
    )
    prompt_length: Annotated[int | None, NoEffect("data.max_prompt_length holds everywhere")] = Key(
        None, FREE, gt=0, description="no effect; must equal data.max_prompt_length"
    )
    response_length: Annotated[int | None, NoEffect("data.max_response_length holds everywhere")] = Key(
        None, FREE, gt=0, description="no effect; must equal data.max_response_length"
    )
    calculate_log_probs: Annotated[bool, NoEffect("a token always comes with its log-probability")] = Key(
        True, FREE, description="no effect; false is refused"
    )
    dtype: Precision = Key(
        "auto",
        UNCOMPARED,
        read_by=("actor", "rollout"),
        description="type in which the engine computes; auto: bfloat16 on a GPU, float32 on a CPU and on GPUs "
        "before Ampere",
    )
    max_num_seqs: int | None = Key(
        None,
        FREE,
        read_by=("rollout",),
        ge=4,
        description="maximum number of rows decoded at once, per engine or server; null: 256, or 1024 with "
        "vLLM alone on a GPU of 70 GiB or more (except an A100)",
    )
    seed: int = Key(42, REFUSED, description="seed of the rows' random streams")
    tensor_model_parallel_size: int = Key(
        1,
        FREE,
        read_by=("rollout",),
        gt=0,
        description="number of GPUs over which one replica's layers are split",
    )
    gpu_memory_utilization: float | None = Key(
        None,
        FREE,
        read_by=("rollout",),
        gt=0,
        le=1,
        description="share of a GPU's memory for weights and KV cache; on a CPU, of the free RAM; null: 0.9 if "
        "the engine has the GPU alone, else 0.5",
    )
    free_cache_engine: bool = Key(
        True,
        FREE,
        read_by=("rollout",),
        description="release the memory while the role sleeps; false: only pause",
    )
    max_num_batched_tokens: int = Key(
        8192,
        FREE,
        read_by=("rollout",),
        gt=0,
        description="maximum tokens of one forward pass, of prompts and decoding rows together",
    )
    enable_chunked_prefill: bool = Key(
        True,
        FREE,
        read_by=("rollout",),
        description="split long prompts into chunks that are batched with decoding rows; off on a CPU",
    )
    enable_prefix_caching: bool = Key(
        True, FREE, read_by=("rollout",), description="share the KV cache of rows with the same prefix"
    )
    enforce_eager: bool = Key(
        False,
        FREE,
        read_by=("rollout",),
        description="disable CUDA graphs and compilation; on a CPU they are always disabled",
    )
    load_format: Annotated[Literal["auto", "safetensors"], NoEffect("weights are read from safetensors")] = Key(
        "auto", FREE, description="no effect: weights are always read from safetensors, never from pickles"
    )
    disable_log_stats: bool = Key(
        True,
        FREE,
        read_by=("rollout",),
        description="false: vLLM logs at INFO, with its throughput and cache use every ten seconds, and its "
        "metrics are on the role's /metrics",
    )
    val_kwargs: ValSamplingConfig = ValSamplingConfig()
    openai: OpenAIConfig = Section(OpenAIConfig(), read_by=("rollout",))
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    agent: AgentConfig = AgentConfig()

    @model_validator(mode="after")
    def _agent_has_what_it_needs(self) -> "RolloutConfig":
        agent = self.agent.default_agent_loop
        if AGENTS[agent].converses and not self.multi_turn.enable:
            raise ValueError(
                f"rollout.agent.default_agent_loop is {agent}, which converses, but rollout.multi_turn.enable "
                "is false; set enable to true"
            )
        if self.agent.default_agent_loop == "external" and not self.agent.external.command:
            raise ValueError(
                "rollout.agent.default_agent_loop is external, but rollout.agent.external.command is empty; "
                "set it to the program, as in [python, agent.py]"
            )
        return self

    @model_validator(mode="after")
    def _tokens_have_log_probs(self) -> "RolloutConfig":
        if not self.calculate_log_probs:
            raise ValueError(
                "calculate_log_probs is false, but correction and metrics need log-probabilities; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _engine_has_the_key(self) -> "RolloutConfig":
        fields = type(self).model_fields
        for engine in ENGINES.values():
            for key in engine.keys:
                unset = (fields[key].default, EARLIER_DEFAULTS.get(key))
                if key not in self.engine.keys and getattr(self, key) not in unset:
                    raise ValueError(
                        f"rollout.{key} is a key of engine {engine.name}, but rollout.name is {self.name}"
                    )
        return self

    @model_validator(mode="after")
    def _other_servers_are_named(self) -> "RolloutConfig":
        if self.works_with_servers and not (self.openai.urls and self.openai.weights_dir):
            raise ValueError(
                f"rollout.name is {self.name}: set rollout.openai.urls to the servers, as in "
                "[http://10.0.0.7:8000], and rollout.openai.weights_dir to a directory shared with them"
            )
        return self

    @model_validator(mode="after")
    def _kept_tokens_are_bounded(self) -> "RolloutConfig":
        if self.truncates and not 0 < self.top_k <= MAX_KEPT:
            raise ValueError(
                f"top_p is {self.top_p:g} and top_k {self.top_k}, but the trainer gets at most {MAX_KEPT} "
                f"tokens that could be sampled; set rollout.top_k between 1 and {MAX_KEPT}"
            )
        return self

    def raised_temperature(self, key: str) -> str:
        """Return why the engine would not sample at the temperature of `rollout` or `rollout.val_kwargs`."""
        sampling = self.val_kwargs if key == "rollout.val_kwargs" else self
        least = self.engine.least_temperature if self.openai.api == "vllm" else 0.0
        if sampling.greedy or sampling.temperature >= least:
            return ""
        return (
            f"{key}.temperature is {sampling.temperature:g}, but engine {self.name} raises it to {least:g}, so "
            "log-probabilities would not be of the actor's distribution; set it to 0 (greedy), or to "
            f"{least:g} or more"
        )

    @property
    def engine(self) -> EngineSpec:
        """The declaration of `name`."""
        return ENGINES[self.name]

    @property
    def works_with_servers(self) -> bool:
        """True if the engine sends its rows to the servers of rollout.openai."""
        return "openai" in self.engine.keys

    def with_rows_and_share(self, own_rows: int | None = None) -> "RolloutConfig":
        """Return this section with max_num_seqs and gpu_memory_utilization decided where they are null.

        Args:
            own_rows: max_num_seqs of vLLM with a GPU of its own; None: it shares the device, or is on a CPU.
        """
        is_alone = own_rows is not None and self.engine.reserves_memory
        most, share = (own_rows or ROWS, OWN_SHARE) if is_alone else (ROWS, SHARE)
        decided = {
            "max_num_seqs": self.max_num_seqs or min(most, self.max_num_batched_tokens),
            "gpu_memory_utilization": self.gpu_memory_utilization or share,
        }
        return self.model_copy(update=decided)

    @property
    def rows(self) -> int:
        """max_num_seqs; if it is not decided, of an engine that shares its device."""
        return self.max_num_seqs or ROWS

    @property
    def share(self) -> float:
        """gpu_memory_utilization; if it is not decided, of an engine that shares its device."""
        return self.gpu_memory_utilization or SHARE

    @property
    def rows_at_once(self) -> int:
        """Rows that one engine decodes at once."""
        return self.rows * (len(self.openai.urls) if self.works_with_servers else 1)

    @property
    def num_kept(self) -> int:
        return self.top_k if self.truncates else 0

    @property
    def sampling(self) -> dict[str, SamplingConfig]:
        """Sampling parameters and responses per prompt, by a request's meta_info["sampling"]."""
        return {"train": self, "validation": self.val_kwargs, "greedy": SamplingConfig(do_sample=False)}
