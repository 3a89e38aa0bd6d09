"""actor: and reference: the policy under training, and the one that it is held close to."""

from typing import Literal

from pydantic import Field, model_validator

from rolemesh.config.base import Config
from rolemesh.config.model import JudgingModelConfig, OptimConfig, PolicyModelConfig

KLPenalty = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


LossMode = Literal[
    "vanilla", "gpg", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "geo_mean",
    "dppo_tv", "dppo_kl", "dro", "bypass",
]  # fmt: skip


class PolicyLossConfig(Config):
    loss_mode: LossMode = Field("vanilla", description="the per-token policy loss")
    clip_cov_ratio: float = Field(0.0002, gt=0, le=1, description="clip_cov: share of the tokens taken out")
    clip_cov_lb: float = Field(1.0, description="clip_cov: of tokens whose covariance is above this")
    clip_cov_ub: float = Field(5.0, description="clip_cov: and below this")
    kl_cov_ratio: float = Field(0.0002, gt=0, le=1, description="kl_cov: share of the tokens that pay a KL")
    ppo_kl_coef: float = Field(0.1, ge=0, description="kl_cov: weight of that KL")
    dro_beta: float | None = Field(None, gt=0, description="dro: weight of the squared log-ratio; 0.05, say")

    @model_validator(mode="after")
    def _dro_has_a_weight(self) -> "PolicyLossConfig":
        if self.loss_mode == "dro" and self.dro_beta is None:
            raise ValueError("loss_mode is dro and dro_beta is not set; 0.05 is usual")
        return self

    @model_validator(mode="after")
    def _covariances_lie_between(self) -> "PolicyLossConfig":
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb {self.clip_cov_lb:g} is not below clip_cov_ub {self.clip_cov_ub:g}")
        return self


class ActorConfig(Config):
    model: PolicyModelConfig = PolicyModelConfig()
    optim: OptimConfig = OptimConfig()
    ppo_mini_batch_size: int = Field(
        256, gt=0, description="prompts per optimizer step (times rollout.n rows); at most train_batch_size"
    )
    ppo_micro_batch_size_per_gpu: int = Field(
        8, gt=0, description="rows per forward and backward pass; changes memory, never the result"
    )
    use_dynamic_bsz: bool = Field(
        False, description="as many rows per pass as ppo_max_token_len_per_gpu holds, not a fixed number"
    )
    ppo_max_token_len_per_gpu: int = Field(
        16384, gt=0, description="tokens per pass; padding counts where model.use_remove_padding is false"
    )
    ppo_epochs: int = Field(1, gt=0, description="passes over each batch")
    shuffle: bool = Field(False, description="a new order of rows in every pass")
    clip_ratio: float = Field(0.2, gt=0, description="PPO clip range epsilon; dppo: the divergence allowed")
    clip_ratio_low: float | None = Field(None, gt=0, description="lower range; null: clip_ratio")
    clip_ratio_high: float | None = Field(None, gt=0, description="upper range; null: clip_ratio")
    clip_ratio_c: float = Field(
        3.0, gt=1, description="dual clip: bound of the loss where A < 0; dppo: of the ratio"
    )
    tau_pos: float = Field(1.0, gt=0, description="sapo: how sharp the gate is where A > 0")
    tau_neg: float = Field(1.05, gt=0, description="sapo: and where it is not")
    loss_agg_mode: LossAggMode = Field(
        "token-mean", description="sapo and geo_mean are seq-mean-token-mean whatever it says"
    )
    loss_scale_factor: int | None = Field(
        None, gt=0, description="divisor of seq-mean-token-sum-norm; null: the response length"
    )
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    entropy_coeff: float = Field(0.0, description="weight of the entropy bonus")
    use_kl_loss: bool = Field(False, description="add kl_loss_coef * KL(actor, reference) to the loss")
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: KLPenalty = "low_var_kl"
    grad_clip: float = Field(1.0, gt=0, description="largest gradient norm")
    seed: int = Field(42, description="of the shuffle, of clip_cov's choice and of a new adapter")

    @model_validator(mode="after")
    def _later_passes_have_a_ratio(self) -> "ActorConfig":
        if self.policy_loss.loss_mode == "gpg" and self.ppo_epochs > 1:
            raise ValueError(
                f"ppo_epochs is {self.ppo_epochs} and policy_loss.loss_mode gpg, which has no ratio: a later "
                "pass would not see how far the policy has moved; set ppo_epochs to 1, or loss_mode to vanilla"
            )
        return self

    @model_validator(mode="after")
    def _ratio_is_held_above_zero(self) -> "ActorConfig":
        if self.policy_loss.loss_mode in ("vanilla", "gspo", "clip_cov", "bypass") and self.clip_low >= 1:
            raise ValueError(
                f"the lower clip range is {self.clip_low:g} (clip_ratio_low, or clip_ratio where that is null) "
                f"and loss_mode {self.policy_loss.loss_mode} holds the ratio above 1 minus it; set it below 1"
            )
        return self

    @property
    def clip_low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


class ReferenceConfig(Config):
    model: JudgingModelConfig = JudgingModelConfig()
    log_prob_micro_batch_size_per_gpu: int = Field(8, gt=0, description="rows per forward pass")
    log_prob_use_dynamic_bsz: bool | None = Field(
        None, description="as many rows per pass as the tokens allow; null: actor.use_dynamic_bsz"
    )
    log_prob_max_token_len_per_gpu: int | None = Field(
        None, gt=0, description="tokens per pass; null: actor.ppo_max_token_len_per_gpu"
    )
