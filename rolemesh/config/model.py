"""A model directory and how it is run."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rolemesh.config.base import Config
from rolemesh.config.effects import NoEffect

Precision = Literal["float32", "bfloat16", "float16"]

NO_BACKWARD = NoEffect("the role is not trained, so it has no backward pass to keep activations for")


class ModelConfig(Config):
    path: str = Field("", description="a Hugging Face model directory; empty: the actor's")
    trust_remote_code: bool = Field(False, description="run Python that comes with the model directory")
    use_remove_padding: bool = Field(
        True,
        description="rows go through the model end to end, what they begin with alike once; false: padded to "
        "P + T tokens each",
    )
    dtype: Precision = Field(
        "float32", description="what matrix products run in; weights and optimizer stay float32 (autocast)"
    )


class JudgingModelConfig(ModelConfig):
    """The model of a role that is not trained."""

    enable_gradient_checkpointing: Annotated[bool, NO_BACKWARD] = Field(True, description="no effect")
    enable_activation_offload: Annotated[bool, NO_BACKWARD] = Field(False, description="no effect")


class TrainedModelConfig(ModelConfig):
    enable_gradient_checkpointing: bool = Field(
        True, description="recompute activations in the backward pass: less memory, about a third more time"
    )
    enable_activation_offload: bool = Field(
        False,
        description="what gradient checkpointing keeps lies in the host's memory; on a CPU it does anyway",
    )

    @model_validator(mode="after")
    def _offload_is_of_checkpoints(self) -> "TrainedModelConfig":
        if self.enable_activation_offload and not self.enable_gradient_checkpointing:
            raise ValueError(
                "enable_activation_offload is true and enable_gradient_checkpointing false, and what is moved "
                "is what the latter keeps; set both to true, or neither"
            )
        return self


class PolicyModelConfig(TrainedModelConfig):
    """The actor's, which may be trained by a low-rank adapter alone (docs/lora.md)."""

    lora_rank: int = Field(0, ge=0, description="train an adapter of this rank and nothing else; 0: train all")
    lora_alpha: int = Field(16, gt=0, description="the adapter counts lora_alpha / lora_rank times")
    target_modules: str | tuple[str, ...] = Field(
        "all-linear",
        description="which modules are adapted: names, as [q_proj, v_proj]; or a pattern of the whole name; "
        "all-linear: every matrix but the head",
    )
    lora_adapter_path: str = Field(
        "", description="start from this adapter, whose own target modules hold; empty: from a new one"
    )

    @model_validator(mode="after")
    def _targets_can_be_looked_for(self) -> "PolicyModelConfig":
        targets = self.target_modules
        if not targets or "" in (targets if isinstance(targets, tuple) else ()):
            raise ValueError("target_modules names nothing; all-linear is every matrix but the head")
        try:
            re.compile(targets if isinstance(targets, str) else "")
        except re.error as error:
            raise ValueError(f"target_modules {targets!r} is no pattern: {error}") from error
        return self


def is_target(module: str, targets: str | Sequence[str]) -> bool:
    """Whether a module is adapted, as peft decides it: a string is a pattern of the whole name, an entry of a
    list the name or its end."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in targets)


class OptimConfig(Config):
    lr: float = Field(1e-6, gt=0, description="AdamW's learning rate, the greatest of its schedule")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the rate falls after the warm-up, until trainer.total_training_steps"
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="linear, cosine: what the rate falls to, as a share of lr"
    )
    lr_warmup_steps: int = Field(
        -1, ge=-1, description="training steps in which the rate rises from 0; 0 or -1: by the ratio"
    )
    lr_warmup_steps_ratio: float = Field(
        0.0, ge=0, le=1, description="warm-up as a share of trainer.total_training_steps"
    )
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates of both moments")
    eps: float = Field(1e-8, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _schedule_has_its_new_name(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "warmup_style" in data:
            raise ValueError("warmup_style is called lr_scheduler_type, here as in newer versions of verl")
        return data

    @model_validator(mode="after")
    def _constant_falls_to_nothing(self) -> "OptimConfig":
        if self.min_lr_ratio and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"min_lr_ratio is {self.min_lr_ratio:g} and lr_scheduler_type constant, which does not fall; "
                "set lr_scheduler_type to cosine or linear, or min_lr_ratio to 0"
            )
        return self

    @property
    def depends_on_total(self) -> str | None:
        """The key by which the schedule depends on the number of all steps, if one does."""
        if self.lr_scheduler_type != "constant":
            return "lr_scheduler_type"
        by_ratio = self.lr_warmup_steps <= 0 and self.lr_warmup_steps_ratio > 0
        return "lr_warmup_steps_ratio" if by_ratio else None


class CriticOptimConfig(OptimConfig):
    lr: float = Field(1e-5, gt=0, description="AdamW's learning rate, the greatest of its schedule")
