"""A model directory and how it is run."""

from typing import Literal

from pydantic import Field

from rolemesh.config.base import Config

Precision = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Config):
    path: str = Field("", description="a Hugging Face model directory; empty: the actor's")
    trust_remote_code: bool = Field(False, description="run Python that comes with the model directory")
    enable_gradient_checkpointing: bool = Field(
        True, description="recompute activations in the backward pass: less memory, about a third more time"
    )
    dtype: Precision = Field(
        "float32", description="what matrix products run in; weights and optimizer stay float32 (autocast)"
    )


class OptimConfig(Config):
    lr: float = Field(1e-6, gt=0, description="AdamW's learning rate after warm-up")
    lr_warmup_steps: int = Field(-1, ge=-1, description="linear warm-up in optimizer steps; -1: by the ratio")
    lr_warmup_steps_ratio: float = Field(0.0, ge=0, le=1, description="warm-up as a share of all steps")
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates of both moments")
    eps: float = Field(1e-8, gt=0)


class CriticOptimConfig(OptimConfig):
    lr: float = Field(1e-5, gt=0, description="AdamW's learning rate after warm-up")
