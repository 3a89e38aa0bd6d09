"""actor: and reference: the policy under training, and the one that it is held close to."""

from typing import Literal

from pydantic import Field

from rolemesh.config.base import Config
from rolemesh.config.model import ModelConfig, OptimConfig, PolicyModelConfig

KLPenalty = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class PolicyLossConfig(Config):
    loss_mode: Literal["vanilla"] = Field("vanilla", description="the per-token policy loss")


class ActorConfig(Config):
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    ppo_mini_batch_size: int = Field(
        256, gt=0, description="prompts per optimizer step (times rollout.n rows); at most train_batch_size"
    )
    ppo_micro_batch_size_per_gpu: int = Field(
        8, gt=0, description="rows per forward and backward pass; changes memory, never the result"
    )
    ppo_epochs: int = Field(1, gt=0, description="passes over each batch")
    shuffle: bool = Field(False, description="a new order of rows in every pass")
    clip_ratio: float = Field(0.2, gt=0, lt=1, description="PPO clip range epsilon")
    clip_ratio_low: float | None = Field(None, gt=0, lt=1, description="lower range; null: clip_ratio")
    clip_ratio_high: float | None = Field(None, gt=0, description="upper range; null: clip_ratio")
    clip_ratio_c: float = Field(3.0, gt=1, description="dual clip: bound of the loss where A < 0")
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: int | None = Field(
        None, gt=0, description="divisor of seq-mean-token-sum-norm; null: the response length"
    )
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = Field(0.0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add kl_loss_coef * KL(actor, reference) to the loss")
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: KLPenalty = "low_var_kl"
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    seed: int = Field(42, description="of the shuffle")


class ReferenceConfig(Config):
    model: PolicyModelConfig = PolicyModelConfig()
    log_prob_micro_batch_size_per_gpu: int = Field(8, gt=0, description="rows per forward pass")
