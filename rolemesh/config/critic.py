"""critic: the value model."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from rolemesh.config.actor import LossAggMode
from rolemesh.config.base import Config
from rolemesh.config.model import CriticOptimConfig, TrainedModelConfig

# Where these are null, JobConfig puts the actor's value in, so that config.yaml and every reader see it.
FOLLOWS_ACTOR = ("ppo_epochs", "shuffle", "loss_agg_mode", "loss_scale_factor")


class CriticConfig(Config):
    model: TrainedModelConfig = Field(
        TrainedModelConfig(), description="a causal LM or a reward model; empty: the actor's"
    )
    optim: CriticOptimConfig = CriticOptimConfig()
    ppo_mini_batch_size: int | None = Field(None, gt=0, description="null: the actor's")
    ppo_micro_batch_size_per_gpu: int = Field(8, gt=0, description="rows per forward and backward pass")
    use_dynamic_bsz: bool | None = Field(
        None, description="as many rows per pass as the tokens allow; null: actor.use_dynamic_bsz"
    )
    ppo_max_token_len_per_gpu: int = Field(32768, gt=0, description="tokens per pass")
    ppo_epochs: int | None = Field(None, gt=0, description="passes over each batch; null: the actor's")
    shuffle: bool | None = Field(None, description="a new order of rows in every pass; null: the actor's")
    cliprange_value: float = Field(0.5, gt=0, description="how far a value may move from the old one")
    loss_agg_mode: LossAggMode | None = Field(
        None, description="how the losses of tokens become one; null: the actor's"
    )
    loss_scale_factor: int | None = Field(
        None, gt=0, description="divisor of seq-mean-token-sum-norm; null: the actor's"
    )
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    seed: int = Field(42, description="of the value head and the shuffle")

    @model_validator(mode="before")
    @classmethod
    def _is_trained_whole(cls, data: Any) -> Any:
        model = data.get("model") if isinstance(data, Mapping) else None
        if isinstance(model, Mapping) and model.get("lora_rank"):
            raise ValueError(
                f"critic.model.lora_rank is {model['lora_rank']}, and a critic is trained whole; adapters are "
                "the actor's (actor.model.lora_rank)"
            )
        return data
