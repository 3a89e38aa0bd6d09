"""The sections model and optim of roles."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from rolemesh.config.base import Config, LocalPath, NoEffect
from rolemesh.config.key_facts import DERIVED, FREE, REFUSED, UNCOMPARED, WARNED, Key, KeyFacts
from rolemesh.errors import InvalidConfig

Precision = Literal["auto", "float32", "bfloat16", "float16"]
AMPERE = (8, 0)  # compute capability of the first GPUs with matrix products in bfloat16

NO_BACKWARD = NoEffect("the role is not trained, so it has no backward pass to keep activations for")
DecayRate = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Config):
    path: LocalPath = Key(
        "",
        DERIVED,
        description="a Hugging Face model directory, or a name of the Hugging Face Hub, ORGANISATION/MODEL; "
        "empty: the actor's",
    )
    revision: str = Key(
        "",
        DERIVED,
        pattern=r"^([\w-][\w./-]*)?$",
        description="branch, tag or commit of a path that is a Hub name; empty: main",
    )
    trust_remote_code: bool = Key(False, FREE, description="run Python code from the model directory")
    use_remove_padding: bool = Key(
        True,
        FREE,
        description="run rows without padding, end to end, with shared prefixes computed once; false: pad each "
        "row "
        "to P + T tokens",
    )
    dtype: Precision = Key(
        "auto",
        DERIVED,
        description="type of matrix products (autocast), in which models that are not trained hold their "
        "weights; trained weights and the optimizer stay float32. auto: bfloat16 on a GPU, float32 on a CPU "
        "and on GPUs before Ampere",
    )

    @model_validator(mode="after")
    def _a_revision_is_of_a_path(self) -> "ModelConfig":
        if self.revision and not self.path:
            raise ValueError(f"revision is {self.revision!r}, but path is empty; set both")
        return self


def chosen_dtype(dtype: str, key: str, device: str, capability: tuple[int, int] = AMPERE) -> str:
    """Return the type in which a model computes on a device; `auto` is decided here.

    auto is bfloat16 on a GPU and float32 on a CPU, as few processors multiply in bfloat16. GPUs before Ampere
    only emulate it and have no attention kernel for it, so auto is float32 there too.

    Args:
        dtype: a Precision.
        key: its key in the job file, for the message.
        device: torch's name for the type of the device: cuda or cpu.
        capability: compute capability of a GPU.

    Raises:
        InvalidConfig: dtype is bfloat16, and the GPU is older than Ampere.
    """
    computes = device == "cuda" and capability >= AMPERE
    if dtype == "auto":
        return "bfloat16" if computes else "float32"
    if dtype == "bfloat16" and device == "cuda" and not computes:
        version, needed = (".".join(map(str, parts)) for parts in (capability, AMPERE))
        raise InvalidConfig(
            f"{key} is bfloat16, but this GPU has compute capability {version}; bfloat16 needs {needed} "
            f"(Ampere) or newer. Set {key} to float32, or to auto, which is float32 here"
        )
    return dtype


class FrozenModelConfig(ModelConfig):
    """The model of a role that is not trained."""

    FACTS: ClassVar[dict[str, KeyFacts]] = {"path": KeyFacts(WARNED), "dtype": KeyFacts(UNCOMPARED)}

    enable_gradient_checkpointing: Annotated[bool, NO_BACKWARD] = Key(True, FREE, description="no effect")
    enable_activation_offload: Annotated[bool, NO_BACKWARD] = Key(False, FREE, description="no effect")


class TrainedModelConfig(ModelConfig):
    enable_gradient_checkpointing: bool = Key(
        True,
        FREE,
        description="recompute activations in the backward pass: less memory, about a third more time",
    )
    enable_activation_offload: bool = Key(
        False,
        FREE,
        description="keep gradient checkpointing's activations in host memory; no effect on a CPU",
    )

    @model_validator(mode="after")
    def _gradients_have_a_range(self) -> "TrainedModelConfig":
        if self.dtype == "float16":
            raise ValueError(
                "dtype is float16, in which nothing is trained: gradients below 6e-8 would vanish without loss "
                "scaling; set it to bfloat16 or float32"
            )
        return self

    @model_validator(mode="after")
    def _offload_is_of_checkpoints(self) -> "TrainedModelConfig":
        if self.enable_activation_offload and not self.enable_gradient_checkpointing:
            raise ValueError(
                "enable_activation_offload is true, but enable_gradient_checkpointing is false; offload moves "
                "the activations that checkpointing keeps, so set both to true, or neither"
            )
        return self


class PolicyModelConfig(TrainedModelConfig):
    """The actor's model. Training may be limited to a low-rank adapter (docs/lora.md)."""

    FACTS: ClassVar[dict[str, KeyFacts]] = {  # its tokenizer is that of the job
        "path": KeyFacts(DERIVED, read_by=("rollout", "reward")),
        "revision": KeyFacts(DERIVED, read_by=("rollout", "reward")),
        "trust_remote_code": KeyFacts(FREE, read_by=("rollout", "reward")),
    }

    lora_rank: int = Key(
        0, DERIVED, ge=0, description="train only a LoRA adapter of this rank; 0: train all weights"
    )
    lora_alpha: int = Key(
        16,
        REFUSED,
        counts_if="actor.model.lora_rank",
        gt=0,
        description="scale of the adapter: its product counts lora_alpha / lora_rank",
    )
    target_modules: str | tuple[str, ...] = Key(
        "all-linear",
        DERIVED,
        counts_if="actor.model.lora_rank",
        description="modules with an adapter: a list of names, e.g. [q_proj, v_proj], or a regular expression "
        "for "
        "the whole name; all-linear: every matrix except the head",
    )
    lora_adapter_path: LocalPath = Key(
        "", DERIVED, description="start from this adapter and its target modules; empty: from a new adapter"
    )

    custom_chat_template: str | None = Key(
        None,
        DERIVED,
        description="the text of a chat template (Jinja), in place of the tokenizer's; checkpoints keep it",
    )

    @model_validator(mode="after")
    def _targets_can_be_looked_for(self) -> "PolicyModelConfig":
        targets = self.target_modules
        if not targets or "" in (targets if isinstance(targets, tuple) else ()):
            raise ValueError("target_modules names nothing; all-linear is every matrix except the head")
        try:
            re.compile(targets if isinstance(targets, str) else "")
        except re.error as error:
            raise ValueError(f"target_modules {targets!r} is not a regular expression: {error}") from error
        return self


def is_target(module: str, targets: str | Sequence[str]) -> bool:
    """Return whether a module gets an adapter, by peft's rule.

    A string is a regular expression for the whole name. An entry of a list matches the name or its last parts.
    """
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)


Ulysses = Annotated[
    int,
    Field(
        gt=0,
        description="ranks that compute the same rows together, each a part of the tokens (Ulysses); "
        "divides the role's ranks and the model's attention heads",
    ),
]


class FsdpConfig(Config):
    """Sharding of a role's model over several ranks (FSDP2, docs/ranks.md). One rank has the model whole."""

    fsdp_size: int = Key(
        -1,
        FREE,
        ge=-1,
        description="ranks that share one copy of the model; -1: all. A smaller number must divide the role's "
        "ranks, and every group of this size has a copy (HSDP)",
    )
    reshard_after_forward: bool = Key(
        True,
        FREE,
        description="free a block's gathered weights after its forward pass and gather them again for the "
        "backward pass; false: less communication, more memory",
    )
    forward_prefetch: bool = Key(
        False, FREE, description="gather a block's weights while the block before it computes"
    )
    param_offload: bool = Key(
        False, FREE, description="keep weights, gradients and the optimizer's state in host memory"
    )
    optimizer_offload: Annotated[bool, NoEffect("the role is not trained, so it has no optimizer")] = Key(
        False, FREE, description="no effect"
    )

    @model_validator(mode="after")
    def _a_copy_needs_ranks(self) -> "FsdpConfig":
        if self.fsdp_size == 0:
            raise ValueError("fsdp_size is 0; expected a number of ranks, or -1 for all")
        return self


class TrainedFsdpConfig(FsdpConfig):
    """FsdpConfig of a role that is trained."""

    optimizer_offload: bool = Key(
        False,
        FREE,
        description="keep the optimizer's state in host memory between its steps; also with one rank",
    )


class CriticModelConfig(TrainedModelConfig):
    fsdp_config: TrainedFsdpConfig = TrainedFsdpConfig()


class OptimConfig(Config):
    lr: float = Key(1e-6, WARNED, gt=0, description="AdamW's learning rate, the maximum of the schedule")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Key(
        "constant", WARNED, description="shape of the decay after the warm-up, until the run's last step"
    )
    min_lr_ratio: float = Key(
        0.0, WARNED, ge=0, le=1, description="linear, cosine: final learning rate, as a share of lr"
    )
    lr_warmup_steps: int = Key(
        -1,
        WARNED,
        ge=-1,
        description="training steps in which the rate rises from 0; 0 or -1: lr_warmup_steps_ratio",
    )
    lr_warmup_steps_ratio: float = Key(
        0.0, WARNED, ge=0, le=1, description="warm-up as a share of the run's training steps; 0: no warm-up"
    )
    weight_decay: float = Key(0.01, WARNED, ge=0, description="AdamW's weight decay; 0: none")
    betas: tuple[DecayRate, DecayRate] = Key(
        (0.9, 0.999), WARNED, description="AdamW's decay rates of the two moments"
    )
    eps: float = Key(1e-8, WARNED, gt=0, description="AdamW's epsilon, added to the denominator")

    @model_validator(mode="before")
    @classmethod
    def _schedule_has_its_new_name(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "warmup_style" in data:
            raise ValueError("warmup_style is now lr_scheduler_type, as in newer versions of verl")
        return data

    @model_validator(mode="after")
    def _constant_falls_to_nothing(self) -> "OptimConfig":
        if self.min_lr_ratio and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"min_lr_ratio is {self.min_lr_ratio:g}, but lr_scheduler_type is constant, which does not "
                "decay; "
                "set lr_scheduler_type to cosine or linear, or min_lr_ratio to 0"
            )
        return self

    @property
    def depends_on_total(self) -> str | None:
        """The key that makes the schedule depend on the total number of steps; None if it does not."""
        if self.lr_scheduler_type != "constant":
            return "lr_scheduler_type"
        by_ratio = self.lr_warmup_steps <= 0 and self.lr_warmup_steps_ratio > 0
        return "lr_warmup_steps_ratio" if by_ratio else None


class CriticOptimConfig(OptimConfig):
    lr: float = Key(1e-5, WARNED, gt=0, description="AdamW's learning rate, the maximum of the schedule")
